# SPDX-License-Identifier: Apache-2.0
"""The export: both programs, one archive, the check, and what there is to say about them."""

import collections
import collections.abc
import copy
import dataclasses
import os
import shutil
import tempfile
import time

import torch
from torch.export.pt2_archive._package import load_pt2
from torch.utils import _pytree

from . import archive, attention
from .check import check_mode, quiet, run
from .errors import CannotWrite, DoesNotExport, ExportError, Mistake, last_lines
from .sizes import Sizes, batch_shapes, list_inputs

MODES = {"both": ("train", "eval"), "train": ("train",), "eval": ("eval",)}
DTYPES = ("bfloat16", "float16", "float32", "float64")
OWN_OPERATORS = ("aten", "higher_order")  # LibTorch's
FREQUENT = 8  # operators that the summary names


@dataclasses.dataclass
class Summary:
    """What was exported. str() is for people."""

    path: str
    modes: tuple
    dtype: str
    parameters: int
    trained: int
    tensors: int
    buffers: int
    inputs: list
    sizes: list
    outputs: list
    operators: dict  # name: calls, of all programs
    checks: dict  # mode: (Difference, sizes)
    notes: list
    num_bytes: int
    seconds: float

    def __str__(self):
        kinds = sorted(self.operators.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(
            f"{name.removeprefix('aten.').removesuffix('.default')} {calls}"
            for name, calls in kinds[:FREQUENT]
        )
        others = "" if len(kinds) <= FREQUENT else f", and {len(kinds) - FREQUENT} more"
        frozen = "" if self.trained == self.parameters else f", {self.trained:,} of them trained"
        lines = [
            ("parameters", f"{self.parameters:,} in {self.tensors} tensors{frozen}; {self.buffers} buffers"),
            ("dtype", self.dtype),
            ("modes", ", ".join(self.modes)),
            ("operators", f"{len(kinds)} kinds: {named}{others}"),
            *(("input", line) for line in self.inputs),
            *(("size", line) for line in self.sizes),
            *(("output", line) for line in self.outputs),
            *(
                (f"check {mode}", f"{difference}, on {sizes}")
                for mode, (difference, sizes) in self.checks.items()
            ),
            *(("note", note) for note in self.notes),
            ("written", f"{self.path}, {self.num_bytes:,} bytes, in {self.seconds:.1f} s"),
        ]
        return "\n".join(f"{name:<12}{value}" for name, value in lines)


def copy_of(module):
    """The module with its own buffers and modes. It shares the parameters."""
    try:
        return copy.deepcopy(module, {id(p): p for p in module.parameters()})
    except Exception as error:
        raise DoesNotExport(
            f"{type(module).__name__} cannot be copied by copy.deepcopy; fix: keep only parameters, buffers "
            f"and plain values in the module. Python says: {last_lines(error)}"
        ) from error


def in_mode(module, mode):
    """A copy in this mode. Parts that the caller set to evaluation stay so while the module itself trains."""
    result = copy_of(module)
    if mode == "eval":
        result.eval()
    elif not result.training:
        result.train()
    return result


def converted(tree, dtype):
    return _pytree.tree_map(
        lambda leaf: (
            leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            else leaf
        ),
        tree,
    )


def dtype_of(name):
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in [getattr(torch, known) for known in DTYPES]:
        raise Mistake(f"dtype is {name}; fix: one of {', '.join(DTYPES)}")
    return dtype


def try_module(module, mode, args, kwargs):
    """Inputs that the module refuses are no matter of the export."""
    try:
        run(in_mode(module, mode), args, kwargs)
    except Exception as error:
        raise Mistake(
            f"{type(module).__name__}.forward fails in Python on the example inputs; fix: give inputs that "
            f"it takes (--input). Python says: {last_lines(error)}"
        ) from error


def trace(module, mode, args, kwargs, shapes):
    try:
        with quiet():
            return torch.export.export(in_mode(module, mode), args, kwargs, dynamic_shapes=shapes)
    except ExportError:
        raise
    except Exception as error:
        hint = (
            (
                "; fix: name the dimensions that change and their ranges (--dynamic, or dynamic_shapes), or "
                "none (--dynamic none, or "
                "dynamic_shapes={}), and keep control flow that depends on values out of forward"
            )
            if shapes
            else (
                "; fix: keep control flow that depends on values out of forward, or change the line that "
                "Python names"
            )
        )
        raise DoesNotExport(
            f"the model does not export in mode {mode}{hint}. Python says: {last_lines(error)}"
        ) from error


def save(program, mode, path):
    try:
        with quiet():
            torch.export.save(program, path)
    except OSError as error:
        raise CannotWrite(
            f"{path}: cannot write: {error.strerror or error}; fix: name another folder, or make room"
        ) from error
    except Exception as error:
        hint = (
            "masks of attention that are built by vmap are one cause; "
            if "lazy_load_decompositions" in str(error)
            else ""
        )
        raise DoesNotExport(
            f"torch.export.save refuses the program of mode {mode}: {hint}fix: change what Python names. "
            f"Python says: {last_lines(error)}"
        ) from error


def operators_of(program):
    counts = collections.Counter()
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if isinstance(node.target, torch._ops.OpOverload):
                counts[str(node.target)] += 1
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                counts[f"higher_order.{node.target.name()}"] += 1
    return counts


def paths_of(tree, path=""):
    """Where the leaves stand, as Python writes it."""
    if isinstance(tree, collections.abc.Mapping):
        parts = [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        parts = [(f"{path}[{number}]", value) for number, value in enumerate(tree)]
    elif dataclasses.is_dataclass(tree):
        parts = [(f"{path}.{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    else:
        yield path
        return
    for name, value in parts:
        yield from paths_of(value, name)


def outputs_of(program, sizes):
    """One line for each tensor."""
    leaves = [
        spec.arg.name
        for spec in program.graph_signature.output_specs
        if spec.kind == torch.export.graph_signature.OutputKind.USER_OUTPUT and hasattr(spec.arg, "name")
    ]
    by_name = {node.name: node.meta.get("val") for node in program.graph.nodes}
    spec = program.module_call_graph[0].signature.out_spec
    paths = list(paths_of(_pytree.tree_unflatten([0] * spec.num_leaves, spec)))
    lines = []
    for name, path in zip(leaves, paths if len(paths) == len(leaves) else [""] * len(leaves)):
        value = by_name.get(name)
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            lines.append(f"{path} {dtype} [{', '.join(map(sizes.text, value.shape))}]".strip())
    return lines


def notes_of(programs):
    notes = []
    libraries = set()
    for program in programs.values():
        libraries.update(name.split(".")[0] for name in operators_of(program))
    libraries = sorted(libraries - set(OWN_OPERATORS))
    if libraries:
        notes.append(
            f"operators of {', '.join(libraries)} are no part of LibTorch: C++ loads their libraries "
            "(ExportedModuleOptions::libraries)"
        )
    return notes


def checked_path(path):
    """Says before the work what would end it."""
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        start, ending = os.path.splitext(path)
        raise Mistake(
            f"the archive's name is {path}, and torch.export reads only names that end in .pt2; "
            f"fix: {start if ending in ('.pt', '.pth') else path}.pt2"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
        what = "it is a folder" if os.path.isdir(path) else f"{folder} is no folder that you may write"
        raise CannotWrite(
            f"{path}: cannot write: {what}; fix: name a file in a folder that exists and that you may write"
        )
    return path


def write(programs, path, check_archive):
    """Writes beside `path`, and moves the archive there once `check_archive(file)` passed."""
    parent = os.path.dirname(os.path.abspath(path))
    try:
        folder = tempfile.mkdtemp(prefix=".export_", dir=parent)
    except OSError as error:
        raise CannotWrite(
            f"{path}: cannot write: {error.strerror}; fix: name a folder that exists and that you may write"
        ) from error
    try:
        files = {}
        for mode, program in programs.items():
            os.mkdir(os.path.join(folder, mode))
            files[mode] = os.path.join(folder, mode, os.path.basename(path))
            save(program, mode, files[mode])
        first, *others = files.values()
        for other in others:
            archive.merge(first, other)
            os.remove(other)
        result = check_archive(first)
        os.replace(first, path)
        return result
    except OSError as error:
        if isinstance(error, ExportError):
            raise
        raise CannotWrite(
            f"{path}: cannot write: {error.strerror or error}; fix: name another file, or make room"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checked(module, programs, file, sizes, args, kwargs):
    """Compares the archive's programs with the module: {mode: (Difference, sizes)}."""
    names = {mode: "model" if mode == next(iter(programs)) else archive.EVAL for mode in programs}
    try:
        with quiet():
            loaded = load_pt2(file).exported_programs
    except Exception as error:
        raise DoesNotExport(
            "PyTorch cannot load the archive that its torch.export.save wrote; fix: another version of "
            "PyTorch, or --no-check "
            f"(check=False), which writes the archive all the same. Python says: {last_lines(error)}"
        ) from error
    return {
        mode: check_mode(
            mode, lambda mode=mode: in_mode(module, mode), loaded[name], sizes[mode], args, kwargs
        )
        for mode, name in names.items()
    }


def summarize(module, path, programs, sizes, checks, notes, begin):
    first = next(iter(programs))
    counts = collections.Counter()
    for program in programs.values():
        counts |= operators_of(program)
    parameters = list(module.parameters())
    dtypes = collections.Counter()
    for parameter in parameters:
        dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return Summary(
        path=path,
        modes=tuple(programs),
        dtype=", ".join(name for name, _ in dtypes.most_common()) or "none",
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        tensors=len(parameters),
        buffers=len(list(module.buffers())),
        inputs=sizes[first].input_lines(),
        sizes=sizes[first].size_lines(),
        outputs=outputs_of(programs[first], sizes[first]),
        operators=dict(counts),
        checks=checks,
        notes=notes,
        num_bytes=os.path.getsize(path),
        seconds=time.perf_counter() - begin,
    )


def export(module, args=(), kwargs=None, *, path, dynamic_shapes=None, modes="both", dtype=None, check=True):
    """Writes the archive `path` (.pt2) and returns a Summary. The module stays as it is.

    args, kwargs    example inputs of forward. Sizes below 2 cannot be dynamic.
    dynamic_shapes  as torch.export.export takes them. None: dimension 0 of every tensor is a batch of at
                    least 2. {}: no size changes.
    modes           "both", "train" or "eval". The module trains as it is if it is in training mode, else
                    after train().
    dtype           converts a copy of the module and the floating-point inputs first: bfloat16, float16,
                    float32 or float64.
    check           compares outputs and buffers of the archive's programs with the module's, on the example
                    and on other sizes.

    Raises Mistake for an argument that cannot be used, DoesNotExport with Python's error, and CannotWrite.
    """
    begin = time.perf_counter()
    path, args, kwargs = checked_path(path), tuple(args), dict(kwargs or {})
    if modes not in MODES:
        raise Mistake(f"modes is {modes}; fix: one of {', '.join(MODES)}")
    if not isinstance(module, torch.nn.Module):
        raise Mistake(
            f"the model is an object of {type(module).__name__}, and no torch.nn.Module; fix: give the module"
        )
    with torch.random.fork_rng():
        if dtype is not None:
            module, args, kwargs = (
                copy.deepcopy(module).to(dtype_of(dtype)),
                *converted((args, kwargs), dtype_of(dtype)),
            )
        if dynamic_shapes is None:
            dynamic_shapes = batch_shapes(module, args, kwargs)
        inputs = list_inputs(module, args, kwargs, dynamic_shapes)
        original, module = module, copy_of(module)
        try_module(module, MODES[modes][0], args, kwargs)
        notes = attention.prepare(module, copy_of, inputs, args, kwargs)
        programs = {mode: trace(module, mode, args, kwargs, dynamic_shapes or None) for mode in MODES[modes]}
        sizes = {mode: Sizes(program, inputs) for mode, program in programs.items()}
        checks = write(
            programs, path, lambda file: checked(module, programs, file, sizes, args, kwargs) if check else {}
        )
    return summarize(original, path, programs, sizes, checks, notes + notes_of(programs), begin)
