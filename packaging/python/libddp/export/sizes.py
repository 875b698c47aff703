# SPDX-License-Identifier: Apache-2.0
"""Inputs of an export: their names, and the sizes that it allows for them."""

import dataclasses
import inspect
import re

import torch
from torch.utils import _pytree

from .errors import Mistake, last_lines

MANY = "int_oo"  # how torch.export writes the end of an open range


@dataclasses.dataclass
class Input:
    """A leaf of the arguments."""

    argument: str  # of forward
    path: tuple  # below the argument
    value: object
    dimensions: dict = dataclasses.field(default_factory=dict)  # what dynamic_shapes says, by number

    @property
    def name(self):
        return self.argument + _pytree.keystr(self.path)


def argument_names(module):
    """Names of forward's arguments that have one, and whether it takes more."""
    parameters = inspect.signature(module.forward).parameters.values()
    fixed = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return fixed, len(fixed) < len(parameters)


def bound(module, args, kwargs):
    """The arguments as torch.export names them in dynamic_shapes."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise Mistake(
            f"the inputs do not fit {type(module).__name__}.forward: {error}; "
            f"fix: give its arguments, which are {', '.join(argument_names(module)[0]) or 'none'}"
        ) from None


def step(spec, key):
    """dynamic_shapes one level deeper; None where it says nothing."""
    index = getattr(key, "idx", getattr(key, "key", None))
    try:
        return spec[index]
    except (KeyError, IndexError, TypeError):
        return None


def dimensions_of(spec):
    """The part of dynamic_shapes for one leaf, by number. An integer has a single mark and no dimensions."""
    if isinstance(spec, (tuple, list)):
        spec = dict(enumerate(spec))
    return {
        number: dim
        for number, dim in (spec.items() if isinstance(spec, dict) else ())
        if dim is not None and not isinstance(dim, int) and dim != torch.export.Dim.STATIC
    }


def resolve(module, args, kwargs, dynamic_shapes):
    """The arguments, and dynamic_shapes as a plain tree. ShapesCollection knows tensors by their identity, so
    this comes before tensors are copied. Also returns what checks a program against AdditionalInputs."""
    verify = getattr(dynamic_shapes, "verify", lambda program: None)
    if isinstance(dynamic_shapes, (torch.export.ShapesCollection, torch.export.AdditionalInputs)):
        bound(module, args, kwargs)
        try:
            dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)
        except Exception as error:
            raise Mistake(
                "dynamic_shapes does not fit the example inputs; fix: assign shapes to the tensors of args "
                f"and kwargs themselves. Python says: {last_lines(error)}"
            ) from error
    wrapper = getattr(torch.export.dynamic_shapes, "_IntWrapper", ())  # of integers in a ShapesCollection
    args, kwargs = _pytree.tree_map(
        lambda leaf: leaf.val if isinstance(leaf, wrapper) else leaf, (tuple(args), dict(kwargs))
    )
    return args, kwargs, dynamic_shapes, verify


def list_inputs(module, args, kwargs, dynamic_shapes=None):
    """All leaves, in the order of the program's inputs."""
    arguments = list(bound(module, args, kwargs))
    parameters = inspect.signature(module.forward).parameters.values()
    fixed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    more = next((p.name for p in parameters if p.kind == p.VAR_KEYWORD), None)
    inputs = []
    for path, value in _pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        key = path[1]
        positional = path[0].idx == 0
        name = (fixed[key.idx] if key.idx < len(fixed) else rest) if positional else key.key
        below, deeper = path[2:], []
        if positional and key.idx >= len(fixed):
            deeper = [_pytree.SequenceKey(key.idx - len(fixed))]
        elif not positional and name not in arguments:
            deeper, name = [key], more
        by_order = isinstance(dynamic_shapes, (tuple, list))
        spec = step(
            dynamic_shapes,
            _pytree.SequenceKey(arguments.index(name)) if by_order else _pytree.MappingKey(name),
        )
        for part in (*deeper, *below):
            spec = step(spec, part)
        inputs.append(Input(name, (*deeper, *below), value, dimensions_of(spec)))
    return inputs


def shapes_for(module, args, kwargs, choose):
    """dynamic_shapes that has choose(name of the argument, tensor) for each tensor."""
    return {
        name: _pytree.tree_map(
            lambda leaf, name=name: choose(name, leaf) if isinstance(leaf, torch.Tensor) else None, value
        )
        for name, value in bound(module, args, kwargs).items()
    }


def batch_shapes(module, args, kwargs, batch=None):
    """Dimension 0 of every tensor is the batch."""
    tensors = [
        i
        for i in list_inputs(module, args, kwargs)
        if isinstance(i.value, torch.Tensor) and i.value.dim() > 0
    ]
    sizes = {i.value.shape[0] for i in tensors}
    fix = (
        "fix: name the dimensions that change (--dynamic x:0=batch, or dynamic_shapes), "
        "or none (--dynamic none, or dynamic_shapes={})"
    )
    if len(sizes) > 1:
        listed = ", ".join(f"{i.name} {tuple(i.value.shape)}" for i in tensors)
        raise Mistake(f"dimension 0 of the inputs is no common batch: {listed}; {fix}")
    if sizes and min(sizes) < 2:
        raise Mistake(
            f"dimension 0 of {tensors[0].name} is {min(sizes)} in the example, and torch.export keeps sizes "
            "below 2 as they are; "
            "fix: an example with at least 2, or no dynamic sizes (--dynamic none, or dynamic_shapes={})"
        )
    batch = batch or torch.export.Dim("batch", min=2)
    return shapes_for(module, args, kwargs, lambda name, leaf: {0: batch} if leaf.dim() > 0 else None)


class Sizes:
    """The sizes that a program allows."""

    def __init__(self, program, inputs):
        self.inputs, self.ranges = inputs, program.range_constraints
        self.conditions = getattr(program, "_guards_code", None) or []  # in Python, of several sizes
        by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        values = [
            by_name[name].meta.get("val") if name in by_name else None for name in placeholders(program)
        ]
        self.shapes = [tuple(getattr(value, "shape", ())) for value in values]
        self.numbers = [value if isinstance(value, torch.SymInt) else None for value in values]  # that change
        self.names, self.values = {}, {}
        for item, shape, value in zip(inputs, self.shapes, self.numbers):
            if value is not None:
                self.note(value.node.expr, item, None, item.value)
            for number, size in enumerate(shape):
                if isinstance(size, torch.SymInt):
                    self.note(size.node.expr, item, number, item.value.shape[number])

    def note(self, expression, item, number, example):
        symbols = expression.free_symbols
        if len(symbols) != 1:
            return
        (symbol,) = symbols
        dimension = item.dimensions.get(number)
        dimension = getattr(dimension, "root", dimension)
        if isinstance(getattr(dimension, "__name__", None), str):
            self.names.setdefault(symbol, dimension.__name__)
        if symbol not in self.values:
            import sympy

            solved = [v for v in sympy.solve(expression - example, symbol) if v.is_Integer]
            if solved:
                self.values[symbol] = int(solved[0])

    def text(self, size):
        if not isinstance(size, torch.SymInt):
            return str(size)
        expression = size.node.expr
        import sympy

        return str(
            expression.xreplace(
                {s: sympy.Symbol(self.names.get(s, str(s)), integer=True) for s in expression.free_symbols}
            )
        )

    def input_lines(self):
        lines = []
        for item, shape, number in zip(self.inputs, self.shapes, self.numbers):
            if number is not None:
                lines.append(f"{item.name}: int {self.text(number)}")
            elif isinstance(item.value, torch.Tensor):
                dtype = str(item.value.dtype).removeprefix("torch.")
                lines.append(f"{item.name}: {dtype} [{', '.join(map(self.text, shape))}]")
            else:
                lines.append(f"{item.name}: {item.value!r}, fixed")
        return lines

    def size_lines(self):
        lines = []
        for symbol in self.values:
            low, high = self.limits(symbol)
            lines.append(
                f"{self.names.get(symbol, symbol)}: {low} " + ("or more" if high is None else f"to {high}")
            )
        for condition in self.conditions:
            lines.append(
                "condition: " + re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.size(\2)", condition)
            )
        return lines

    def limits(self, symbol):
        found = self.ranges.get(symbol)
        if found is None:
            return 2, None
        return int(found.lower), None if str(found.upper) == MANY else int(found.upper)

    def other_values(self):
        """Values of all symbols, larger and smaller than the example's, where the ranges allow them."""
        choices = []
        for step_ in (1, -1):
            chosen = {}
            for symbol, value in self.values.items():
                low, high = self.limits(symbol)
                allowed = [
                    v
                    for v in (value + step_, value - step_)
                    if v >= max(low, 2) and (high is None or v <= high)
                ]
                chosen[symbol] = allowed[0] if allowed else value
            if chosen != self.values and chosen not in choices:
                choices.append(chosen)
        return choices

    def resized(self, args, kwargs, values):
        """The arguments in other sizes. Their values are the example's, repeated."""
        leaves, spec = _pytree.tree_flatten((tuple(args), dict(kwargs)))

        def wanted(size):
            known = isinstance(size, torch.SymInt) and size.node.expr.free_symbols <= values.keys()
            return int(size.node.expr.xreplace(values)) if known else None

        for position, shape in enumerate(self.shapes):
            if wanted(self.numbers[position]) is not None:
                leaves[position] = wanted(self.numbers[position])
            for number, size in enumerate(shape):
                if wanted(size) is not None:
                    leaf = leaves[position]
                    rows = torch.arange(wanted(size), device=leaf.device) % leaf.shape[number]
                    leaves[position] = (
                        leaf.detach().index_select(number, rows).requires_grad_(leaf.requires_grad)
                    )
        return _pytree.tree_unflatten(leaves, spec)


def placeholders(program):
    """Names of the user's inputs, one for each leaf: a number or None has a placeholder too."""
    return [
        getattr(spec.arg, "name", None)
        for spec in program.graph_signature.input_specs
        if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT
    ]
