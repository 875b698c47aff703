# SPDX-License-Identifier: Apache-2.0
"""The export: both programs, one archive, the check, and what there is to say about them."""

import collections
import collections.abc
import copy
import dataclasses
import os
import time

import torch
from torch._library import custom_ops
from torch.export.pt2_archive._package import load_pt2
from torch.utils import _pytree

from . import archive, attention
from .check import RefusesForeignBoxes, check_mode, copied, quiet, run
from .errors import DoesNotExport, ExportError, Mistake, last_lines
from .files import checked_path, storages_of, write
from .operators import use_twins
from .ranges import export_program
from .sizes import Sizes, batch_shapes, list_inputs, resolve

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
    warnings: list
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
            *(("warning", warning) for warning in self.warnings),
            ("written", f"{self.path}, {self.num_bytes:,} bytes, in {self.seconds:.1f} s"),
        ]
        return "\n".join(f"{name:<12}{value}" for name, value in lines)


def copy_of(module, shared=True):
    """The module with its own buffers and modes. It shares the parameters unless told otherwise. Tensors
    over the memory of a parameter stay so."""
    known = {}
    if shared:
        storages = storages_of(module.named_parameters())
        known = {id(p): p for p in module.parameters()}
        known["torch"] = {identity: storage for identity, (_, storage) in storages.items()}
    try:
        return copy.deepcopy(module, known)
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
        with RefusesForeignBoxes():
            run(in_mode(module, mode), args, kwargs)
    except ExportError:
        raise
    except Exception as error:
        raise Mistake(
            f"{type(module).__name__}.forward fails in Python on the example inputs in mode {mode}; fix: "
            "give inputs that it takes (--input), or export a mode in which it runs (--mode). Python says: "
            f"{last_lines(error)}"
        ) from error


def trace(module, mode, args, kwargs, shapes, verify):
    try:
        with quiet():
            program = export_program(in_mode(module, mode), args, kwargs, shapes)
            verify(program)
            refuse_constants_over_parameters(program)
            use_twins(program)
            return program
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


def refuse_constants_over_parameters(program):
    """torch.export.save stores constants apart from the parameters, so they would not follow the training."""
    parameters = storages_of(program.named_parameters())
    for memory, (constant, _) in storages_of(program.constants.items()).items():
        if memory in parameters:
            raise DoesNotExport(
                f"{constant} shares the memory of the parameter {parameters[memory][0]}, which an archive "
                "does not record; fix: compute it in forward, or register it as a persistent buffer"
            )


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


def autocast_devices(program):
    """The types of devices that regions of torch.autocast name."""
    return {
        node.args[0]
        for module in program.graph_module.modules()
        for node in getattr(getattr(module, "graph", None), "nodes", ())
        if isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() == "wrap_with_autocast"
    }


def warnings_of(programs, module, args, kwargs):
    tensors = [*module.parameters(), *_pytree.tree_leaves((args, kwargs))]
    devices = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
    named = set().union(*(autocast_devices(program) for program in programs.values()))
    return [
        f"a region of torch.autocast({device!r}) was exported on {', '.join(sorted(devices))}, where it does "
        f"nothing. Without {device} PyTorch also records it as switched off, so it stays off on {device}; "
        f"fix: export with the model and its inputs on {device}"
        for device in sorted(named - devices)
    ]


def notes_of(programs):
    names = set().union(*(operators_of(program) for program in programs.values()))
    names = [name.split(".") for name in sorted(names) if name.split(".")[0] not in OWN_OPERATORS]
    if not names:
        return []
    packages = ", ".join(sorted({package for package, *_ in names}))
    libraries = [path for path in sorted(torch.ops.loaded_libraries) if registers(path, names)]
    notes = [
        f"operators of {packages} are no part of LibTorch: C++ loads their libraries "
        "(ExportedModuleOptions::libraries, in exported_ddp model.libraries)"
        + (f", here {', '.join(libraries)}" if libraries else "")
    ]
    in_python = {f"{package}::{name}" for package, name, *_ in names} & set(custom_ops.OPDEFS)
    if in_python:
        notes.append(
            f"{', '.join(sorted(in_python))}: defined in Python, so C++ needs a library that registers this "
            "name, with its gradient"
        )
    return notes


def registers(path, names):
    """Whether a shared object has the name of one of the operators."""
    with open(path, "rb") as file:
        code = file.read()
    return any(name.encode() in code for _, name, *_ in names)


def loading_hint(programs, error):
    for program in programs.values():
        for spec in program.graph_signature.output_specs:
            if isinstance(getattr(spec.arg, "value", None), str):
                return f"forward returns the text {spec.arg.value!r}; fix: return tensors and numbers"
    if "wrap_with_autocast" in str(error):
        return "torch.no_grad inside torch.autocast is a likely cause; fix: change their order, or detach()"
    return "fix: another version of PyTorch"


def checked(module, programs, file, sizes, args, kwargs):
    """Compares the archive's programs with the module: {mode: (Difference, sizes)}. Gradients are those of
    the program that C++ trains."""
    names = {mode: "model" if mode == next(iter(programs)) else archive.EVAL for mode in programs}
    try:
        with quiet():
            loaded = load_pt2(file).exported_programs
    except Exception as error:
        raise DoesNotExport(
            "PyTorch cannot load the archive that its torch.export.save wrote: "
            f"{loading_hint(programs, error)}, or --no-check (check=False), which writes the archive all the "
            f"same. Python says: {last_lines(error)}"
        ) from error
    return {
        mode: check_mode(
            mode,
            lambda mode=mode: in_mode(module, mode),
            loaded[name],
            sizes[mode],
            args,
            kwargs,
            backward=mode == next(iter(programs)),
        )
        for mode, name in names.items()
    }


def summarize(module, path, programs, sizes, checks, notes, warnings, begin):
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
        warnings=warnings,
        num_bytes=os.path.getsize(path),
        seconds=time.perf_counter() - begin,
    )


def export(module, args=(), kwargs=None, *, path, dynamic_shapes=None, modes="both", dtype=None, check=True):
    """Writes the archive `path` (.pt2) and returns a Summary. The module stays as it is.

    args, kwargs    example inputs of forward. Sizes below 2 cannot be dynamic.
    dynamic_shapes  as torch.export.export takes them, also a ShapesCollection or AdditionalInputs. None:
                    dimension 0 of every tensor is a batch of at least 2. {}: no size changes.
    modes           "both", "train" or "eval". The module trains as it is if it is in training mode, else
                    after train().
    dtype           converts a copy of the module and the floating-point inputs first: bfloat16, float16,
                    float32 or float64.
    check           compares outputs and buffers of the archive's programs with the module's, and gradients
                    of the program that trains, on the example and on other values and sizes.

    Raises Mistake for an argument that cannot be used, DoesNotExport with Python's error, and CannotWrite.
    """
    begin = time.perf_counter()
    path = checked_path(path)
    if modes not in MODES:
        raise Mistake(f"modes is {modes}; fix: one of {', '.join(MODES)}")
    if not isinstance(module, torch.nn.Module):
        raise Mistake(
            f"the model is an object of {type(module).__name__}, and no torch.nn.Module; fix: give the module"
        )
    if isinstance(args, torch.Tensor):
        raise Mistake("args is a tensor; fix: a tuple of the arguments, such as (images,)")
    args, kwargs = tuple(args), dict(kwargs or {})
    with torch.random.fork_rng():
        args, kwargs, dynamic_shapes, verify = resolve(module, args, kwargs, dynamic_shapes)
        args, kwargs = copied((args, kwargs))  # torch.export takes one tensor for two inputs as one input
        if dtype is not None:
            module = copy_of(module, shared=False).to(dtype_of(dtype))
            args, kwargs = converted((args, kwargs), dtype_of(dtype))
        if dynamic_shapes is None:
            dynamic_shapes = batch_shapes(module, args, kwargs)
        inputs = list_inputs(module, args, kwargs, dynamic_shapes)
        original, module = module, copy_of(module)
        for mode in MODES[modes]:
            try_module(module, mode, args, kwargs)
        notes = attention.prepare(module, copy_of, inputs, args, kwargs)
        programs = {
            mode: trace(module, mode, args, kwargs, dynamic_shapes or None, verify) for mode in MODES[modes]
        }
        sizes = {mode: Sizes(program, inputs) for mode, program in programs.items()}
        checks = write(
            programs, path, lambda file: checked(module, programs, file, sizes, args, kwargs) if check else {}
        )
    notes, warnings = notes + notes_of(programs), warnings_of(programs, module, args, kwargs)
    return summarize(original, path, programs, sizes, checks, notes, warnings, begin)
