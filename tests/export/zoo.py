#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the models of zoo_models.py in C++ and in Python, and compares them as reference.py does.

usage: zoo.py EXPORTED_CASE [NAME …|all] [--plain] [--table docs/exported_zoo.md] [--keep FOLDER]
              [--jobs 1 | --fork]

Each model is exported as tools/export_model.py does it, with the programs of training and evaluation. Then
exported_case trains the archive for ten steps on another batch than that of the export, beside the model in
Python: outputs, losses, gradients, parameters, buffers and the outputs of evaluation, in bits. Python loads
the trained weights and the trained archive. --table writes one row for each model into the page.

Each model has a process of its own. With --fork it is a copy of this one, which has imported PyTorch and
transformers: that takes seconds less for each model, but measures no memory. The exit code is 1 if a model
failed, and 77 if a package is missing.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[1:1] = [HERE, os.path.join(ROOT, "packaging", "python")]
from zoo_models import MODELS, SIZES  # noqa: E402

SECONDS = 900  # for one model
BEGIN, END = "<!-- zoo.py: the lines up to the end mark are generated -->", "<!-- zoo.py: end -->"
HEAD = (
    "| Model | Source | Parameters | Calls | Bits | Step, ms: C++, Python | Peak, MiB: C++, Python |\n"
    "|---|---|---:|---:|---|---:|---:|"
)
TENSOR = re.compile(r"(?P<name>\w+)=\w+\[(?P<sizes>[^\]]*)\]")
FIGURES = re.compile(
    r"(?P<equal>\d+) equal, (?P<different>\d+) different; step (?P<ms>\S+) ms, peak (?P<mib>\S+) MiB"
)
REPLACED = re.compile(r"fuse replaced (.*) \(training\)")
APART = re.compile(r"differs by up to (\S+?):")


@dataclasses.dataclass
class Row:
    name: str
    status: str = "failed"  # or equal, close (as Python's own program), differs, skipped
    text: str = ""  # the cause
    parameters: int = 0
    calls: int = 0
    cpp_ms: float = 0.0
    python_ms: float = 0.0
    cpp_mib: float = 0.0
    python_mib: float = 0.0

    def line(self):
        source = MODELS[self.name].split()[0]
        if self.status == "skipped" or not self.cpp_ms:
            figures = ["–", "–"]
        else:
            figures = [
                f"{self.cpp_ms:.1f}, {self.python_ms:.1f}",
                f"{self.cpp_mib:.0f}, {self.python_mib:.0f}",
            ]
        cells = [f"`{self.name}`", f"`{source}`", f"{self.parameters:,}", str(self.calls or "–"), self.text]
        return f"| {' | '.join(cells + figures)} |"


def arguments_of(name, column):
    """The command line of a model with the sizes of a column, and the dimensions that change."""
    words = MODELS[name].split(" ")
    changing, letters = [], set()
    for i, word in enumerate(words):
        tensor = TENSOR.match(word) if words[i - 1] == "--input" else None
        if tensor is None:
            continue
        sizes = tensor["sizes"].split(",")
        changing += [f"{tensor['name']}:{n}={size}" for n, size in enumerate(sizes) if size in SIZES]
        letters.update(size for size in sizes if size in SIZES)
        known = ",".join(str(SIZES[size][column]) if size in SIZES else size for size in sizes)
        words[i] = word.replace(f"[{tensor['sizes']}]", f"[{known}]")
    ranges = [f"{letter}={SIZES[letter][2]}" for letter in sorted(letters)]
    return ["model.pt2", "--from", *words, "--dynamic", ",".join(changing + ranges)]


def made(name, column):
    """The model as new, args, kwargs, and the options of the command."""
    import torch
    from libddp.export import command, program
    from libddp.export.sources import make_model

    options = command.parse(arguments_of(name, column))
    torch.manual_seed(0)
    model, offered = make_model(options.source, options)
    args, kwargs = command.inputs_of(model, options, offered)
    if options.dtype:
        model.to(program.dtype_of(options.dtype))
        args, kwargs = program.converted((args, kwargs), program.dtype_of(options.dtype))
    names = list(inspect.signature(model.forward).parameters)
    while not isinstance(args[-1], torch.Tensor):  # exported_case gives tensors alone by position
        kwargs[names[len(args) - 1]] = args[-1]
        args = args[:-1]
    return model.train(), args, kwargs, options


def train_in_python(folder, name):
    """Trains on the sizes of the training. Two things are as in the archive, because another order of sums
    has other bits: causal models of transformers have no mask, and torch.nn no fast path of evaluation."""
    import reference
    import torch
    from libddp.export import attention, sizes

    model, args, kwargs, _ = made(name, 1)
    attention.configure(model, sizes.list_inputs(model, args, kwargs))
    torch.backends.mha.set_fastpath_enabled(False)
    return reference.write_case(folder, model, args, kwargs)


def export_archive(folder, name):
    from libddp.export import command, export

    model, args, kwargs, options = made(name, 0)
    return export(
        model,
        args,
        kwargs,
        path=os.path.join(folder, "model.pt2"),
        dynamic_shapes=command.dynamic_shapes(model, args, kwargs, options.dynamic),
        modes=options.mode,
    )


def judge(row, printed):
    """Reads what exported_case prints."""
    found = FIGURES.search(printed)
    if found is None:
        row.text = "C++: " + printed.strip().splitlines()[-1]
        return
    row.cpp_ms, row.cpp_mib = float(found["ms"]), float(found["mib"])
    equal, different = int(found["equal"]), int(found["different"])
    row.status = "differs" if different else "equal"
    row.text = f"{equal} equal"
    if different:
        apart = max(map(float, APART.findall(printed)), default=float("nan"))
        row.text = f"{different} of {equal + different} differ, by up to {apart:.1g}"
    if replaced := REPLACED.search(printed):
        chains = sum(int(count) for count in re.findall(r"\d+", replaced[1]))
        row.text += f"; {chains} chains of {row.calls} calls replaced"


def run_one(program, name, folder):
    """The proofs of one model. Figures of Python come first, while the process is fresh."""
    import torch

    torch.set_num_threads(1)
    row = Row(name)
    row.python_ms, row.python_mib = train_in_python(folder, name)
    summary = export_archive(folder, name)
    print(summary)
    row.parameters = summary.parameters
    archive = torch.export.load(os.path.join(folder, "model.pt2"))
    row.calls = sum(node.op == "call_function" for node in archive.graph.nodes)
    done = subprocess.run([program, folder], capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout, done.stderr)
    judge(row, done.stdout + done.stderr)
    if row.status == "differs" and any(check.different for check, _ in summary.checks.values()):
        row.status, row.text = "close", f"{row.text}; Python's own program differs from the model too"
    if row.status == "equal":
        import reference

        reference.check_trained(folder, made(name, 0)[0])
    return row


def child(program, name, folder):
    """Writes FOLDER/row.json. Whatever fails is a row too."""
    try:
        row = run_one(program, name, folder)
    except SystemExit as end:  # of reference.py, which needs safetensors
        row = Row(name, "skipped" if end.code == 77 else "failed", f"exit code {end.code}")
    except Exception as error:
        missing = isinstance(error, ImportError) or "is not installed" in str(error)
        missing = missing or "there is no Python module" in str(error)
        row = Row(name, "skipped" if missing else "failed", f"{type(error).__name__}: {error}")
        import traceback

        traceback.print_exc()
    with open(os.path.join(folder, "row.json"), "w") as file:
        json.dump(dataclasses.asdict(row), file)


def import_packages():
    """What every model needs. What is missing, the models say."""
    with contextlib.suppress(ImportError, SystemExit):
        import reference  # noqa: F401
        import torch  # noqa: F401
        import transformers.modeling_outputs  # noqa: F401
        from libddp.export import command  # noqa: F401


def fork_child(program, name, folder):
    """The exit code of a copy of this process that is the child."""
    process = os.fork()
    if process == 0:
        with open(os.path.join(folder, "log"), "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            child(program, name, folder)
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def start(program, name, keep, fork):
    """A model in its own process."""
    with contextlib.ExitStack() as stack:
        folder = os.path.join(keep, name) if keep else stack.enter_context(tempfile.TemporaryDirectory())
        os.makedirs(folder, exist_ok=True)
        result = os.path.join(folder, "row.json")
        with contextlib.suppress(FileNotFoundError):
            os.remove(result)
        if fork:
            code = fork_child(program, name, folder)
        else:
            command = [sys.executable, os.path.abspath(__file__), program, name, "--child", folder]
            with open(os.path.join(folder, "log"), "w") as log:
                code = subprocess.run(
                    command, stdout=log, stderr=log, timeout=2 * SECONDS, check=False
                ).returncode
        if not os.path.exists(result):
            return Row(name, text=f"the process ended with {code}")
        with open(result) as file:
            return Row(**json.load(file))


def write_table(path, row):
    """Replaces the row of this model, and drops rows of unknown models."""
    with open(path, encoding="utf-8") as file:
        before, rest = file.read().split(BEGIN)
    old, after = rest.split(END)
    lines = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
    lines[row.name] = row.line()
    table = "\n".join([HEAD, *(lines[name] for name in MODELS if name in lines)])
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", metavar="EXPORTED_CASE")
    parser.add_argument("names", metavar="NAME", nargs="*", default=["all"])
    parser.add_argument("--table", metavar="PAGE", help="writes the rows into this page")
    parser.add_argument("--keep", metavar="FOLDER", help="keeps archives and logs")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--fork", action="store_true", help="starts models sooner, one at a time")
    parser.add_argument("--plain", action="store_true", help="without ops of ddp::ops in place of operators")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    program = os.path.abspath(options.program)
    if options.child:
        return child(program, options.names[0], options.child)
    if options.plain:
        os.environ["PLAIN"] = "1"  # exported_case reads it
    names = list(MODELS) if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; fix: one of {', '.join(MODELS)}")
    if options.fork:
        if options.table or options.jobs > 1:
            parser.error("--fork goes without --table and --jobs")
        import_packages()
    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda name: start(program, name, options.keep, options.fork), names):
            rows.append(row)
            print(f"{row.status:8}{row.line()}", flush=True)
            if options.table and row.status != "skipped":
                write_table(options.table, row)
    statuses = [row.status for row in rows]
    print(", ".join(f"{statuses.count(s)} {s}" for s in ("equal", "close", "differs", "failed", "skipped")))
    if {"differs", "failed"} & set(statuses):
        return 1
    return 77 if "skipped" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
