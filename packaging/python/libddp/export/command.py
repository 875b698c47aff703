# SPDX-License-Identifier: Apache-2.0
"""Exports a PyTorch model into an archive that C++ trains (docs/exported_models.md).

    tools/export_model.py resnet50.pt2 --from torchvision:resnet50 --set num_classes=10
    tools/export_model.py vit.pt2 --from timm:vit_base_patch16_224
    tools/export_model.py gpt2.pt2 --from transformers:GPT2LMHeadModel --config n_layer=4,n_embd=256 \\
        --input 'input_ids=int64[2,128]<50257'
    tools/export_model.py net.pt2 --from my_package.my_module:make_model \\
        --input 'x=float32[4,3,32,32]' --dynamic x:0=batch,batch=2..64

The archive has the program of training, the program of evaluation, and the weights once. The command compares
both with the model in Python: on the example inputs, and on other sizes.

Exit codes: 0 exported, 64 a mistake in the call, 65 the model does not export, 70 another error, 73 the
archive cannot be written.
"""

import argparse
import inspect
import itertools
import json
import re
import sys
import traceback

from .errors import ExportError, Mistake, last_lines
from .sources import keyed, make_model, split

TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\](<(?P<below>\d+))?")
DIMENSION = re.compile(r"(?P<input>[\w.]+):(?P<number>\d+)=((?P<factor>\d+)\*)?(?P<name>[A-Za-z_]\w*)")
RANGE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<low>\d+)\.\.(?P<high>\d*)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(Mistake.exit_code, f"error: {message}; fix: {self.prog} --help lists the options\n")


def parse(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", metavar="OUT.pt2")
    add(
        "--from",
        dest="source",
        metavar="SOURCE",
        required=True,
        help="torchvision:NAME, timm:NAME, transformers:CLASS, or MODULE:MAKER",
    )
    add(
        "--set",
        metavar="KEY=VALUE,…",
        action="append",
        default=[],
        help="arguments of the function that makes the model",
    )
    add(
        "--config",
        metavar="JSON or KEY=VALUE,…",
        help="values of the configuration of a transformers: class, or a file with JSON",
    )
    add("--pretrained", metavar="PATH or NAME", help="weights of a transformers: class; random without it")
    add(
        "--input",
        metavar="NAME=DTYPE[SIZES]",
        action="append",
        default=[],
        help="an example input of random values: x=float32[4,3,224,224], "
        "ids=int64[2,128]<1000 for integers below 1000, or a fixed value: power=2",
    )
    add(
        "--dynamic",
        metavar="INPUT:DIM=NAME,…",
        action="append",
        default=[],
        help="dimensions that change: x:0=batch,x:2=4*cells, and their ranges: "
        "batch=2..64. Without it dimension 0 of every input is a batch of at least 2. none: no size changes",
    )
    add(
        "--mode",
        choices=["both", "train", "eval"],
        default="both",
        help="programs in the archive (default: both)",
    )
    add(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        help="converts the model and its inputs before the export",
    )
    add("--seed", type=int, default=0, help="of random weights and example inputs (default: 0)")
    add("--no-check", action="store_true", help="does not compare the archive with the model")
    options = parser.parse_args(arguments)
    settings = {}
    for text in options.set:
        settings.update(keyed(text, "--set"))
    options.set = settings
    return options


def random_tensor(dtype_name, sizes, below, what):
    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise Mistake(
            f"{what}: there is no dtype {dtype_name}; fix: float32, int64 or another dtype of torch"
        )
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    if below is not None and not is_integer:
        raise Mistake(f"{what}: <{below} is for integers; fix: leave it out")
    if below == 0:
        raise Mistake(f"{what}: no integer lies in 0 to 0; fix: a limit of at least 1")
    try:
        if dtype == torch.bool:
            return torch.rand(sizes) < 0.5
        if not is_integer:
            return torch.randn(sizes, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
        greatest = torch.iinfo(dtype).max
        if below is not None and below > greatest + (dtype != torch.int64):
            raise Mistake(
                f"{what}: {dtype_name} holds integers up to {greatest}; fix: a limit of at most {greatest}"
            )
        return torch.randint(2 if below is None else below, sizes, dtype=dtype)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(
            f"{what}: the example cannot be made; fix: smaller sizes, or another dtype, such as float32 or "
            f"int64. Python says: {last_lines(error)}"
        ) from error


def example_value(text, what):
    """A tensor for float32[2,3], else a fixed value."""
    found = TENSOR.fullmatch(text.strip())
    if found:
        sizes = [int(size) for size in found["sizes"].split(",") if size.strip()]
        return random_tensor(found["dtype"], sizes, int(found["below"]) if found["below"] else None, what)
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        raise Mistake(
            f"{what}: {text!r} is neither a tensor nor a number; fix: x=float32[4,3,224,224], "
            "ids=int64[2,128]<1000, or power=2"
        ) from None


def by_position(module, values):
    """Arguments from the first on go by position, as C++ gives them; the others by name."""
    parameters = inspect.signature(module.forward).parameters
    more = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in values if name not in parameters]
    if unknown and not more:
        raise Mistake(
            f"--input {unknown[0]}: {type(module).__name__}.forward has no such argument; fix: one of "
            f"{', '.join(parameters)}"
        )
    args, values = [], dict(values)
    for name, parameter in parameters.items():
        if name not in values or parameter.kind not in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            break
        args.append(values.pop(name))
    return tuple(args), values


def given_inputs(module, texts):
    values = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name.isidentifier():
            raise Mistake(f"--input {text} has no name; fix: --input x=float32[4,3,224,224]")
        values[name] = example_value(value, f"--input {text}")
    return by_position(module, values)


def offered_inputs(function):
    """What example_inputs() returns: a tensor, a tuple of arguments, a dict of keyword arguments, or (tuple,
    dict)."""
    try:
        values = function()
    except Exception as error:
        raise Mistake(
            f"example_inputs() fails with {type(error).__name__}: {error}; fix: correct it, or give --input"
        ) from error
    if isinstance(values, dict):
        return (), values
    if not isinstance(values, (tuple, list)):
        return (values,), {}
    if len(values) == 2 and isinstance(values[0], (tuple, list)) and isinstance(values[1], dict):
        return tuple(values[0]), values[1]
    return tuple(values), {}


def inputs_of(module, options, offered):
    """args and kwargs of the export."""
    if options.input:
        return given_inputs(module, options.input)
    if callable(offered):
        return offered_inputs(offered)
    if not offered:
        names = ", ".join(inspect.signature(module.forward).parameters)
        raise Mistake(
            f"there are no example inputs for {type(module).__name__}.forward({names}); "
            "fix: --input x=float32[4,3,224,224] for each, or a function example_inputs() beside the model's "
            "maker"
        )
    return by_position(
        module,
        {name: random_tensor(dtype, sizes, below, name) for name, (dtype, sizes, below) in offered.items()},
    )


def read_dynamic(texts):
    """{input: {dimension: (factor, name)}} and {name: (least, greatest)}."""
    dimensions, ranges = {}, {}
    parts = itertools.chain.from_iterable(split(text) for text in texts)
    for part in map(str.strip, parts):
        dimension, limits = DIMENSION.fullmatch(part), RANGE.fullmatch(part)
        if dimension and dimension["factor"] and int(dimension["factor"]) == 0:
            raise Mistake(f"--dynamic {part} is always 0; fix: a factor of at least 1")
        if dimension:
            dimensions.setdefault(dimension["input"], {})[int(dimension["number"])] = (
                int(dimension["factor"] or 1),
                dimension["name"],
            )
        elif limits:
            ranges[limits["name"]] = int(limits["low"]), int(limits["high"]) if limits["high"] else None
            if limits["high"] and int(limits["high"]) < int(limits["low"]):
                raise Mistake(f"--dynamic {part} is an empty range; fix: the smaller size first")
            if limits["high"] and int(limits["high"]) == int(limits["low"]):
                raise Mistake(
                    f"--dynamic {part} is a single size; fix: a range, or leave this dimension out of "
                    "--dynamic, which fixes its size"
                )
        else:
            raise Mistake(
                f"--dynamic {part} is neither INPUT:DIM=NAME nor NAME=LEAST..GREATEST; fix: "
                "x:0=batch,batch=2..64, or none"
            )
    return dimensions, ranges


def dynamic_shapes(module, args, kwargs, texts):
    """What torch.export takes; None for the default."""
    from torch.export import Dim

    from .sizes import batch_shapes, bound, shapes_for

    if not texts:
        return None
    if texts == ["none"]:
        return {}
    dimensions, ranges = read_dynamic(texts)
    used = set()
    for dims in dimensions.values():
        used.update(name for _, name in dims.values())
    used = used or {"batch"}
    for name in ranges:
        if name not in used:
            raise Mistake(
                f"--dynamic {name}=… is the range of no dimension; fix: INPUT:DIM={name}, or one of "
                f"{', '.join(sorted(used))}"
            )
    symbols = {
        name: Dim(name, min=ranges.get(name, (2, None))[0], max=ranges.get(name, (2, None))[1])
        for name in used
    }
    if not dimensions:
        return batch_shapes(module, args, kwargs, symbols["batch"])
    arguments = bound(module, args, kwargs)
    for name in dimensions:
        if name not in arguments:
            raise Mistake(
                f"--dynamic {name}: the example has no input of this name; fix: one of {', '.join(arguments)}"
            )

    def choose(name, tensor):
        for number, (factor, symbol) in dimensions.get(name, {}).items():
            least, greatest = ranges.get(symbol, (2, None))
            check_size(f"{name}:{number}", tensor, number, factor, least, greatest)
        return {
            number: symbols[symbol] if factor == 1 else factor * symbols[symbol]
            for number, (factor, symbol) in dimensions.get(name, {}).items()
        } or None

    return shapes_for(module, args, kwargs, choose)


def check_size(what, tensor, number, factor, least, greatest):
    """The example must have a size of the range."""
    if number >= tensor.dim():
        raise Mistake(
            f"--dynamic {what}: the input has {tensor.dim()} dimensions, the first is 0; fix: a number below "
            f"{tensor.dim()}"
        )
    size = tensor.shape[number]
    if size < 2:
        raise Mistake(
            f"--dynamic {what}: the example has size {size}, and torch.export keeps sizes below 2 as they "
            "are; fix: an example of at least 2"
        )
    if size % factor or size // factor < least or (greatest is not None and size // factor > greatest):
        end = "" if greatest is None else factor * greatest
        raise Mistake(
            f"--dynamic {what}: the example has size {size}, outside of the range {factor * least}..{end}"
            f"{f' in steps of {factor}' if factor > 1 else ''}; fix: another example size, or another range"
        )


def run(arguments):
    options = parse(arguments)
    try:
        import torch
    except ImportError:
        raise Mistake(
            "this Python has no torch; fix: `source .venv/bin/activate` in libddp's folder, where "
            "quickstart.sh installs it, or pip install torch, or call the Python that has it"
        ) from None
    from .program import checked_path, export

    checked_path(options.path)
    torch.manual_seed(options.seed)
    model, offered = make_model(options.source, options)
    if not isinstance(model, torch.nn.Module):
        raise Mistake(
            f"{options.source} returns an object of {type(model).__name__}, and no torch.nn.Module; fix: "
            "return the model"
        )
    args, kwargs = inputs_of(model, options, offered)
    shapes = dynamic_shapes(model, args, kwargs, options.dynamic)
    print(
        export(
            model,
            args,
            kwargs,
            path=options.path,
            dynamic_shapes=shapes,
            modes=options.mode,
            dtype=options.dtype,
            check=not options.no_check,
        )
    )


def main(arguments=None):
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"error: the export ended at {place.filename}:{place.lineno}; fix: change what Python names, or "
            f"report this as a bug. Python says: {last_lines(error)}",
            file=sys.stderr,
        )
        return ExportError.exit_code
    return 0
