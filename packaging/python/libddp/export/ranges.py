# SPDX-License-Identifier: Apache-2.0
"""Conditions on sizes that hold in the whole range. PyTorch refuses an export if it cannot prove one."""

import itertools

import torch

REFUSAL = "Constraints violated"
GREATEST = 2**20  # size that an open range is tried up to
TRIED = 512  # combinations of sizes


def sizes_in(allowed, count):
    """The least sizes of a range, its powers of two, and its greatest size."""
    low, high = int(allowed.lower), int(min(allowed.upper, GREATEST))
    powers = {2**exponent for exponent in range(high.bit_length())}
    near = range(low, min(low + count, high + 1))
    return sorted({size for size in {*near, *powers, high} if low <= size <= high})


def holds(condition, ranges):
    """Whether a condition of sympy is true for the sizes that are tried."""
    symbols = sorted(condition.free_symbols, key=str)
    if any(symbol not in ranges for symbol in symbols):
        return False
    count = round(TRIED ** (1 / max(len(symbols), 1)))
    choices = [sizes_in(ranges[symbol], count) for symbol in symbols]
    return all(bool(condition.subs(dict(zip(symbols, sizes)))) for sizes in itertools.product(*choices))


def conditions_of(program):
    """What the program asserts about sizes."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            value = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
            if isinstance(value, torch.SymBool):
                yield value.node.expr


def export_program(module, args, kwargs, shapes):
    """torch.export.export. If it refuses conditions that hold in the ranges, the program asserts them."""
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        if REFUSAL not in str(error):
            raise
        refused = error
    try:
        program = torch.export.export(
            module, args, kwargs, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
        )
    except Exception:
        raise refused from None
    if not all(holds(condition, program.range_constraints) for condition in conditions_of(program)):
        raise refused
    return program
