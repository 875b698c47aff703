# SPDX-License-Identifier: Apache-2.0
"""Where libddp is: python -m libddp. Also starts its programs: libddp-resnet and others."""

import argparse
import functools
import glob
import importlib.metadata
import importlib.util
import os
import sys

EXIT_SETTINGS = 64  # as that of the programs
PREFIX = os.path.dirname(os.path.realpath(__file__))


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_SETTINGS)


def fail_damaged(problem):
    fail(f"the libddp in {PREFIX} is damaged: {problem}; fix: pip install --force-reinstall --no-deps libddp")


def metadata_of(package, read):
    """What pip recorded about a package, None without a record."""
    try:
        return read(package)
    # importlib.metadata raises errors of many types if files of the record are missing or damaged.
    except Exception:
        return None


def version_of_libddp():
    return metadata_of("libddp", importlib.metadata.version) or fail_damaged(
        "pip's record of its version is missing"
    )


def required_torch():
    lines = metadata_of("libddp", importlib.metadata.requires) or []
    found = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    return found[0] if found else fail_damaged("pip's record of the torch that it needs is missing")


def needs_cuda():
    """Whether libddp was built with CUDA: the libraries that a program links are in its pkg-config file."""
    path = os.path.join(PREFIX, "lib", "pkgconfig", "ddp.pc")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        fail_damaged(f"{path} cannot be read: {error}")
    if "-ltorch" not in text:
        fail_damaged(f"{path} names no libraries")
    return "-ltorch_cuda" in text


def find_torch():
    """Folder of the torch that libddp was built with. Ends the process if this Python has none or another
    one."""
    required = required_torch()
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(
            f"libddp was built with torch {required}, but this Python has no torch; fix: pip install "
            f"torch=={required}"
        )
    folder = os.path.realpath(spec.submodule_search_locations[0])
    found = metadata_of("torch", importlib.metadata.version)
    if not found:
        fail(
            f"libddp was built with torch {required}, but pip did not install the torch in {folder}, whose "
            "version is unknown; "
            f"fix: remove {os.path.dirname(folder)} from PYTHONPATH, and pip install torch=={required}"
        )
    # "2.11.0+cu130" is 2.11.0 from another index.
    if required not in (found, found.split("+")[0]):
        fail(
            f"libddp was built with torch {required}, but torch {found} is installed in {folder}; fix: pip "
            f"install torch=={required}, "
            f"or build libddp's wheel again with torch {found}"
        )
    if needs_cuda() and not os.path.exists(os.path.join(folder, "lib", "libtorch_cuda.so")):
        fail(
            f"libddp was built with torch {required} and CUDA, but torch {found} in {folder} has no CUDA; "
            f"fix: pip install --force-reinstall torch=={required} from an index with CUDA, or build "
            f"libddp's wheel again with torch {found}"
        )
    return folder


def run(program):
    """Replaces this process by one of the programs, so that its signals and exit codes are those of the
    program."""
    torch = find_torch()
    site = os.path.dirname(torch)
    # The programs look for torch beside libddp. It is elsewhere if only one of both is in a user's or a
    # virtual environment's folder.
    if site != os.path.dirname(PREFIX):
        folders = [os.path.join(torch, "lib"), *sorted(glob.glob(os.path.join(site, "nvidia", "*", "lib")))]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        )
    path = os.path.join(PREFIX, "bin", program)
    try:
        os.execv(path, [path, *sys.argv[1:]])
    except OSError as error:
        fail_damaged(f"{path} cannot be started: {error.strerror}")


resnet = functools.partial(run, "resnet_ddp")
vit = functools.partial(run, "vit_ddp")
cnn = functools.partial(run, "cnn_ddp")
lora = functools.partial(run, "lora_ddp")
gpt2 = functools.partial(run, "gpt2_ddp")
bert = functools.partial(run, "bert_ddp")
exported = functools.partial(run, "exported_ddp")
cluster_check = functools.partial(run, "cluster_check")
selftest = functools.partial(run, "libddp-selftest")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; fix: python -m libddp --help lists the options")


def main():
    parser = Parser(
        prog="python -m libddp",
        description="Prints where libddp is. Its programs are "
        + ", ".join(
            f"libddp-{name}"
            for name in (
                "resnet",
                "vit",
                "cnn",
                "lora",
                "gpt2",
                "bert",
                "exported",
                "cluster-check",
                "selftest",
            )
        )
        + ".",
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--cmake-prefix-path",
        action="store_true",
        help="value of CMAKE_PREFIX_PATH for find_package(ddp): libddp and torch",
    )
    choice.add_argument(
        "--prefix", action="store_true", help="libddp's folder, with bin, lib, include and share/ddp/configs"
    )
    choice.add_argument(
        "--version", action="store_true", help="versions of libddp and of the torch that it needs"
    )
    arguments = parser.parse_args()
    if arguments.version:
        print(f"libddp {version_of_libddp()} (torch {required_torch()})")
    else:
        print(PREFIX if arguments.prefix else f"{PREFIX};{find_torch()}")


if __name__ == "__main__":
    main()
