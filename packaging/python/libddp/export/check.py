# SPDX-License-Identifier: Apache-2.0
"""Compares the programs of an archive with the module in Python."""

import contextlib
import dataclasses
import io
import logging
import math
import warnings

import torch
from torch.utils import _pytree

from .errors import DoesNotExport, last_lines

SEED = 1


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
    different: int = 0  # in bits
    greatest: float = 0.0
    relative: float = 0.0  # to the greatest expected value
    allowed: float = 0.0  # relative

    def add(self, other):
        for field in ("tensors", "different"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        for field in ("greatest", "relative", "allowed"):
            setattr(self, field, max(getattr(self, field), getattr(other, field)))

    def __str__(self):
        if not self.different:
            return f"equal in bits ({self.tensors} tensors)"
        return (
            f"{self.different} of {self.tensors} tensors differ, by up to {self.greatest:.3g} "
            f"({self.relative:.2g} of the greatest value)"
        )


def tensors_of(tree):
    return [leaf.detach() for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bits(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def difference(expected, found):
    """None if the tensors do not correspond."""
    if len(expected) != len(found):
        return None
    result = Difference(tensors=len(expected))
    for a, b in zip(expected, found):
        if a.shape != b.shape or a.dtype != b.dtype:
            return None
        if torch.equal(bits(a), bits(b)):
            continue
        result.different += 1
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        apart = torch.where(a.isnan() & b.isnan() | (a == b), 0, (a - b).abs()).max().item()
        size = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
        apart = math.inf if math.isnan(apart) else apart
        result.greatest = max(result.greatest, apart)
        result.relative = max(result.relative, apart / size if size else apart)
    floats = [t.dtype for t in expected if t.is_floating_point() or t.is_complex()]
    result.allowed = max((math.sqrt(torch.finfo(dtype).eps) for dtype in floats), default=0.0)
    return result


def copied(tree):
    return _pytree.tree_map(
        lambda leaf: (
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        tree,
    )


def run(module, args, kwargs):
    """Outputs of a call that begins with the same seed."""
    torch.manual_seed(SEED)
    args, kwargs = copied((tuple(args), dict(kwargs)))
    with torch.enable_grad(), quiet():
        return tensors_of(module(*args, **kwargs))


def buffers_of(module):
    return {name: tensor.detach() for name, tensor in module.named_buffers(remove_duplicate=False)}


def compare(mode, eager, program, args, kwargs):
    """Outputs, and buffers after the call, of two modules."""
    found, expected = run(program, args, kwargs), run(eager, args, kwargs)
    names = sorted(buffers_of(eager).keys() & buffers_of(program).keys())
    for module, tensors in ((eager, expected), (program, found)):
        tensors += [buffers_of(module)[name] for name in names]
    result = difference(expected, found)
    if result is None:
        raise DoesNotExport(
            f"the program of {mode} has other outputs than the module: {[tuple(t.shape) for t in found]}, "
            f"in Python {[tuple(t.shape) for t in expected]}; fix: return tensors whose sizes follow the "
            "inputs' sizes"
        )
    if result.relative > result.allowed:
        raise DoesNotExport(
            f"the program of {mode} computes something else than the module: {result}; "
            "fix: draw random numbers by torch alone, and let forward depend on its inputs and tensors only; "
            "--no-check (check=False) writes the archive all the same"
        )
    return result


def check_mode(mode, make_eager, program, sizes, args, kwargs):
    """Compares on the example and on other sizes. Returns the difference and the sizes that were tried."""
    eager, program = make_eager(), program.module()
    total = compare(mode, eager, program, args, kwargs)
    problem = None
    for values in sizes.other_values():
        try:
            other_args, other_kwargs = sizes.resized(args, kwargs, values)
            run(make_eager(), other_args, other_kwargs)
        except Exception as error:  # the module's own: these values do not fit each other
            problem = problem or error
            continue
        try:
            total.add(compare(mode, eager, program, other_args, other_kwargs))
        except DoesNotExport:
            raise
        except Exception as error:
            raise DoesNotExport(
                f"the program of {mode} refuses sizes that its ranges allow ({sizes_text(sizes, values)}); "
                "fix: narrow the range, or name the relation between the dimensions. Python says: "
                f"{last_lines(error)}"
            ) from error
        return total, f"the example and {sizes_text(sizes, values)}"
    return total, "the example only" + (
        f" (the module refuses other sizes: {last_lines(problem)})" if problem else ""
    )


def sizes_text(sizes, values):
    return ", ".join(f"{sizes.names.get(symbol, symbol)}={value}" for symbol, value in values.items())
