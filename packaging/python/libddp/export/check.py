# SPDX-License-Identifier: Apache-2.0
"""Compares the programs of an archive with the module in Python."""

import contextlib
import dataclasses
import functools
import io
import logging
import math
import warnings

import torch
from torch.utils import _pytree

from .errors import DoesNotExport, Mistake, last_lines

SEED = 1
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BOX_OPERATORS = (
    "torchvision.roi_align",
    "torchvision.roi_pool",
    "torchvision.ps_roi_align",
    "torchvision.ps_roi_pool",
)


@contextlib.contextmanager
def quiet():
    """Without what torch.export logs and prints for its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclasses.dataclass
class Difference:
    """Of two lists of tensors."""

    tensors: int = 0
    gradients: int = 0  # among them
    different: int = 0  # in bits
    greatest: float = 0.0
    relative: float = 0.0  # to the greatest expected value
    allowed: float = 0.0  # relative

    def add(self, other):
        for field in ("tensors", "gradients", "different"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        for field in ("greatest", "relative", "allowed"):
            setattr(self, field, max(getattr(self, field), getattr(other, field)))

    def __str__(self):
        if not self.different:
            gradients = f", {self.gradients} of them gradients" if self.gradients else ""
            return f"equal in bits ({self.tensors} tensors{gradients})"
        return (
            f"{self.different} of {self.tensors} tensors differ, by up to {self.greatest:.3g} "
            f"({self.relative:.2g} of the greatest value)"
        )


class RefusesForeignBoxes(torch.overrides.TorchFunctionMode):
    """Refuses boxes whose first column names an image outside of the batch, which torchvision's kernels
    read all the same. Modes like this one turn fast paths of PyTorch off."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if str(function).startswith(BOX_OPERATORS):
            given = {**dict(zip(("input", "rois"), args)), **(kwargs or {})}
            images, numbers = len(given["input"]), given["rois"][:, 0]
            outside = numbers[~((numbers >= 0) & (numbers < images))]
            if len(outside):
                raise Mistake(
                    f"{str(function).removesuffix('.default')} gets a box of image {outside[0].item():g} of "
                    f"{images} images, and would read foreign memory; fix: give the numbers of images as an "
                    f"input of integers with their limit (--input 'numbers=int64[8]<{images}'), make them in "
                    "forward, or give example inputs that name images of the batch"
                )
        return function(*args, **(kwargs or {}))


def tensors_of(tree):
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def plain(tensor):
    """The values as a dense tensor that has no lazy conjugation."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def bits(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def greatest_value(tensor):
    tensor = tensor.abs()
    return tensor[tensor.isfinite()].max().item() if tensor.isfinite().any() else 0.0


def tolerance(tensors):
    floats = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    return max((math.sqrt(torch.finfo(dtype).eps) for dtype in floats), default=0.0)


def difference(expected, found, least=0.0):
    """None if the tensors do not correspond. Values below `least` count as rounding of larger ones."""
    if len(expected) != len(found):
        return None
    result = Difference(tensors=len(expected), allowed=tolerance(expected))
    for a, b in zip(expected, found):
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return None
        a, b = plain(a), plain(b)
        if torch.equal(bits(a), bits(b)):
            continue
        result.different += 1
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        apart = torch.where(a.isnan() & b.isnan() | (a == b), 0, (a - b).abs()).max().item()
        size = max(greatest_value(a), least)
        apart = math.inf if math.isnan(apart) else apart
        result.greatest = max(result.greatest, apart)
        result.relative = max(result.relative, apart / size if size else apart)
    return result


def own_copy(tensor):
    """A tensor of its own with the same values and strides."""
    leaf = tensor.detach()
    lazy = leaf.is_conj() or leaf.is_neg() or leaf.is_quantized
    if type(leaf) is not torch.Tensor or leaf.layout != torch.strided or lazy or leaf.numel() == 0:
        return leaf.clone().requires_grad_(tensor.requires_grad)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride()))
    storage = leaf.as_strided((reach,), (1,)).clone().untyped_storage()
    result = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(storage, 0, leaf.shape, leaf.stride())
    return result.requires_grad_(tensor.requires_grad)


def copied(tree):
    return _pytree.tree_map(lambda leaf: own_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def with_other_values(tree):
    """Other numbers for each input, in the range of the example's. So a program that reads another input
    instead is seen. Integers can be positions in other inputs, so they change only where two inputs are
    equal."""
    leaves, spec = _pytree.tree_flatten(tree)
    seen = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        values = leaf.detach()
        same = [t for t in seen if (t.shape, t.dtype, t.device) == (leaf.shape, leaf.dtype, leaf.device)]
        seen.append(values)
        if leaf.dtype in FLOATS:
            values = values.flatten().roll(position + 1).view(leaf.shape) * (1 - (position % 32 + 1) / 64)
        elif any(torch.equal(values, other) for other in same):
            values = values.flatten().roll(position + 1).view(leaf.shape)
        leaves[position] = values.clone().requires_grad_(leaf.requires_grad)
    return _pytree.tree_unflatten(leaves, spec)


def call(module, args, kwargs):
    """Tensors of the result of a call that begins with the same seed."""
    torch.manual_seed(SEED)
    with torch.enable_grad(), quiet():
        return tensors_of(module(*args, **kwargs))


def run(module, args, kwargs):
    return [tensor.detach() for tensor in call(module, *copied((tuple(args), dict(kwargs))))]


def buffers_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.named_buffers(remove_duplicate=False)}


def restore(module, buffers):
    """A backward that computes activations again updates buffers again. Later calls begin without that."""
    with torch.no_grad():
        for name, tensor in module.named_buffers(remove_duplicate=False):
            if not torch.equal(bits(plain(tensor)), bits(plain(buffers[name]))):
                tensor.copy_(buffers[name])  # never an expanded buffer, which nothing can write


def names_of_parameters(module):
    """All names of each parameter that trains, by the first."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return {same[0]: same for same in names.values()}


def gradients_of(outputs, sources):
    """{name: gradient or None}. Random weights of the outputs keep their gradients from cancelling."""
    generator = torch.Generator().manual_seed(SEED)
    weights = [
        torch.randn(t.shape, generator=generator, dtype=torch.complex64 if t.is_complex() else None).to(t)
        for t in outputs
    ]
    used = [(tensor, weight) for tensor, weight in zip(outputs, weights) if tensor.requires_grad]
    if not used or not sources:
        return dict.fromkeys(sources)
    tensors, weights = zip(*used)
    with quiet():
        found = torch.autograd.grad(tensors, list(sources.values()), weights, allow_unused=True)
    return dict(zip(sources, found))


@dataclasses.dataclass
class Result:
    """Of one call."""

    outputs: list
    buffers: dict
    gradients: dict  # name: tensor or None
    problem: Exception = None  # of the backward


def evaluate(module, parameters, sizes, args, kwargs):
    """A call, and the gradients of inputs and of these parameters ({name: all names}; None: no backward)."""
    args, kwargs = copied((tuple(args), dict(kwargs)))
    sources = {
        f"input {item.name}": leaf
        for item, leaf in zip(sizes.inputs, _pytree.tree_leaves((args, kwargs)))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    outputs = call(module, args, kwargs)
    result = Result([t.detach() for t in outputs], buffers_of(module), {})
    if parameters is None:
        return result
    own = dict(module.named_parameters(remove_duplicate=False))
    for names in parameters.values():
        sources.update({name: own[name] for name in names if name in own and own[name].requires_grad})
    try:
        found = gradients_of(outputs, sources)
    except Exception as error:
        result.problem = error
        return result
    finally:
        restore(module, result.buffers)
    result.gradients = {name: found[name] for name in sources if name.startswith("input ")}
    for name, names in parameters.items():  # a loaded program has one parameter for each name
        ids = {id(own[n]): found[n] for n in names if found.get(n) is not None}
        result.gradients[name] = functools.reduce(torch.add, ids.values()) if ids else None
    return result


def values_in(program):
    """What the operators of a program's module return, as tensors without memory."""
    for part in program.modules():
        for node in getattr(getattr(part, "graph", None), "nodes", ()):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype in FLOATS:
                yield value


def compare_gradients(mode, expected, found, rounding):
    """Gradients of two calls, which differ by `rounding` at least. Sums of several gradients of a weight are
    rounded to the dtype of a region of torch.autocast, or not."""

    def refuse(name, what):
        raise DoesNotExport(
            f"the program of {mode} has another gradient than the module: {name} {what}; likely causes: "
            "torch.export records no backward of a custom torch.autograd.Function, no hooks, no "
            "torch.inference_mode, and no torch.no_grad inside torch.autocast; fix: write the gradient with "
            "operators and detach(); --no-check (check=False) writes the archive all the same"
        )

    if found.problem:
        raise DoesNotExport(
            f"the backward of the program of {mode} fails, and that of the module does not; a likely cause: "
            "forward assigns a buffer after it used the old value (self.mean = ...), and the program writes "
            "it in place; fix: use self.mean.clone() before. "
            f"Python says: {last_lines(found.problem)}"
        )
    pairs = {name: (gradient, found.gradients.get(name)) for name, gradient in expected.gradients.items()}
    known = [plain(a) for a, _ in pairs.values() if a is not None]
    least = tolerance(known) * max(map(greatest_value, known), default=0.0)
    total = Difference()
    for name, (a, b) in pairs.items():
        if a is None and b is None:
            continue
        if (a is None and plain(b).any()) or (
            b is None and plain(a).any()
        ):  # torch.cond gives zeros for None
            refuse(name, f"has a gradient in {'Python' if b is None else 'the program'} alone")
        if a is None or b is None:
            total.add(Difference(tensors=1, gradients=1, different=1))
            continue
        result = difference([a], [b], least)
        if result is None:
            refuse(name, f"has {tuple(b.shape)} {b.dtype}, in Python {tuple(a.shape)} {a.dtype}")
        result.allowed = max(result.allowed, rounding)
        if result.relative > result.allowed:
            refuse(name, f"differs by {result.greatest:.3g} ({result.relative:.2g} of the greatest value)")
        result.gradients = 1
        total.add(result)
    return total


def compare(mode, eager, program, sizes, args, kwargs, parameters):
    """Outputs, buffers after the call, and gradients of two modules."""
    expected = evaluate(eager, parameters, sizes, args, kwargs)
    if expected.problem:
        parameters = None
    found = evaluate(program, parameters, sizes, args, kwargs)
    names = sorted(expected.buffers.keys() & found.buffers.keys())
    tensors = [result.outputs + [result.buffers[name] for name in names] for result in (expected, found)]
    result = difference(*tensors)
    if result is None:
        raise DoesNotExport(
            f"the program of {mode} has other outputs than the module: "
            f"{[tuple(t.shape) for t in found.outputs]}, in Python "
            f"{[tuple(t.shape) for t in expected.outputs]}; fix: return tensors whose sizes follow the "
            "inputs' sizes"
        )
    if result.relative > result.allowed:
        raise DoesNotExport(
            f"the program of {mode} computes something else than the module: {result}; "
            "fix: draw random numbers by torch alone, and let forward depend on its inputs and tensors only; "
            "--no-check (check=False) writes the archive all the same"
        )
    if parameters is not None:
        result.add(compare_gradients(mode, expected, found, tolerance(values_in(program))))
    return result, expected.problem


def trials(sizes, args, kwargs):
    """Other inputs and what is other about them, as functions: the module may refuse some."""
    for values in [*sizes.other_values(), {}]:
        text = sizes_text(sizes, values) or "other values"
        yield text, lambda values=values: with_other_values(sizes.resized(args, kwargs, values))
        if values:
            yield text, lambda values=values: sizes.resized(args, kwargs, values)


def takes_boxes(program):
    nodes = (
        node for part in program.modules() for node in getattr(getattr(part, "graph", None), "nodes", ())
    )
    return any(str(node.target).startswith(BOX_OPERATORS) for node in nodes)


def check_mode(mode, make_eager, program, sizes, args, kwargs, backward):
    """Compares on the example, and on other values and sizes, with gradients if `backward`. Returns the
    difference and what was tried."""
    program = program.module()
    with RefusesForeignBoxes() if takes_boxes(program) else contextlib.nullcontext():
        return compare_mode(mode, make_eager, program, sizes, args, kwargs, backward)


def compare_mode(mode, make_eager, program, sizes, args, kwargs, backward):
    """As check_mode, of the program's module."""
    eager = make_eager()
    parameters = names_of_parameters(eager) if backward else None
    try:
        total, lost = compare(mode, eager, program, sizes, args, kwargs, parameters)
    except DoesNotExport:
        raise
    except Exception as error:
        raise DoesNotExport(
            f"the program of {mode} fails on the example inputs, which the module takes; fix: change what "
            "Python names; --no-check (check=False) writes the archive all the same. Python says: "
            f"{last_lines(error)}"
        ) from error
    without = f", without gradients, because Python's backward fails: {last_lines(lost)}" if lost else ""
    problem = None
    for text, make_inputs in trials(sizes, args, kwargs):
        try:
            other_args, other_kwargs = make_inputs()
            run(make_eager(), other_args, other_kwargs)
        except Exception as error:  # the module's own: these values do not fit each other
            problem = problem or error
            continue
        try:
            total.add(compare(mode, eager, program, sizes, other_args, other_kwargs, parameters)[0])
        except DoesNotExport:
            raise
        except Exception as error:
            raise DoesNotExport(
                f"the program of {mode} refuses inputs that the module takes and that its ranges allow "
                f"({text}); fix: narrow the range, or name the relation between the dimensions. Python says: "
                f"{last_lines(error)}"
            ) from error
        return total, f"the example and {text}{without}"
    refused = f" (the module refuses others: {last_lines(problem)})" if problem else ""
    return total, f"the example only{refused}{without}"


def sizes_text(sizes, values):
    return ", ".join(f"{sizes.names.get(symbol, symbol)}={value}" for symbol, value in values.items())
