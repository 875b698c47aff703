# SPDX-License-Identifier: Apache-2.0
"""Models by name: of torchvision, timm, transformers, or of the caller's own module."""

import difflib
import importlib
import inspect
import json
import os
import sys

from .errors import DoesNotExport, Mistake, last_lines

BATCH, LENGTH, IMAGE = 2, 16, 224  # of example inputs
PACKAGES = ("torchvision", "timm", "transformers")


def keyed(text, option):
    """{key: value} of "key=value,key=value". Values are JSON, Python's True, False and None, or words."""
    values = {}
    for part in split(text):
        key, found, value = part.partition("=")
        if not found or not key.strip():
            raise Mistake(
                f"{option} {part!r} is no key=value; fix: {option} "
                f"{'n_layer=2' if option == '--config' else 'num_classes=10'}"
            )
        value = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value.strip())
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value
    return values


def split(text):
    """Parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def config_values(text):
    """Values of --config: JSON, a file with JSON, or key=value pairs."""
    try:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        values = json.loads(text) if text.lstrip().startswith("{") else keyed(text, "--config")
    except (OSError, ValueError) as error:
        if isinstance(error, Mistake):
            raise
        raise Mistake(
            f"--config {text[:60]!r} cannot be read: {error}; fix: JSON, or n_layer=2,n_head=4"
        ) from None
    return values


def load(name, package=None):
    """A Python module. The current folder comes first in the search path of the caller's own."""
    if package is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise DoesNotExport(
                f"{name} needs {error.name}, which is not installed; fix: pip install {error.name}"
            ) from None
        fix = f"pip install {package}" if package else "start in the folder that holds it, or set PYTHONPATH"
        raise Mistake(f"there is no Python module {name}; fix: {fix}") from None
    except Exception as error:
        raise DoesNotExport(
            f"importing {name} fails; fix: the line that Python names. Python says: {last_lines(error)}"
        ) from error


def call(make, name, values, option):
    try:
        return make(**values)
    except TypeError as error:
        raise Mistake(
            f"{name} does not take these values: {error}; fix: {option} with arguments of {name}"
        ) from None
    except Exception as error:
        raise Mistake(
            f"{name} cannot be made; fix: other values ({option}). Python says: {last_lines(error)}"
        ) from error


def refuse(given, option, kind, instead):
    if given:
        raise Mistake(f"{option} is for transformers: classes, and the model is {kind}; fix: {instead}")


def image(model, sizes):
    """The example input of a model whose first argument is a batch of images."""
    return {next(iter(inspect.signature(model.forward).parameters)): ("float32", (BATCH, *sizes), None)}


def torchvision_model(name, options):
    package = load("torchvision.models", "torchvision")
    refuse(options.config, "--config", "of torchvision", "--set num_classes=10")
    refuse(options.pretrained, "--pretrained", "of torchvision", "--set weights=DEFAULT")
    if name not in package.list_models():
        raise Mistake(
            f"torchvision has no model {name}; fix: one of torchvision.models.list_models(), such as resnet50"
        )
    model = call(lambda **values: package.get_model(name, **values), name, options.set, "--set")
    size = getattr(model, "image_size", IMAGE)
    return model, image(model, (3, size, size))


def timm_model(name, options):
    package = load("timm", "timm")
    refuse(options.config, "--config", "of timm", "--set num_classes=10")
    refuse(options.pretrained, "--pretrained", "of timm", "--set pretrained=true")
    if not package.is_model(name):
        raise Mistake(
            f"timm has no model {name}; fix: one of timm.list_models(), such as vit_base_patch16_224"
        )
    model = call(lambda **values: package.create_model(name, **values), name, options.set, "--set")
    size = getattr(model, "default_cfg", {}).get("input_size", (3, IMAGE, IMAGE))
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)  # of --set img_size
    return model, image(model, (size[0], *(patches or size[1:])))


def known_values(config):
    """Names that the configuration has, and that may be given to it."""
    kind = type(config)
    settable = [name for name in dir(kind) if getattr(getattr(kind, name), "fset", None) is not None]
    return {name for name in (*config.to_dict(), *kind.attribute_map, *settable) if not name.startswith("_")}


def has_effect(kind, values, key):
    """Whether an unknown name changes known values: transformers also reads names of its older versions."""
    try:
        with_key, without = (vars(kind(**given)) for given in (values, {**values, key: None}))
        without_key = vars(kind(**{k: v for k, v in values.items() if k != key}))
    except Exception:  # the name is read, and its value is refused
        return True
    return any(
        {k: v for k, v in state.items() if k != key} != {k: v for k, v in without_key.items() if k != key}
        for state in (with_key, without)
    )


def config_parts(config, values):
    """Configurations inside this one that `values` changes: name, class and values."""
    import transformers

    for key, value in values.items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and isinstance(part, transformers.PretrainedConfig):
            named = value.get("model_type", part.model_type)
            kind = transformers.CONFIG_MAPPING[named] if named in transformers.CONFIG_MAPPING else type(part)
            yield key, type(part) if named == part.model_type else kind, value


def check_config(kind, values, path=""):
    """Refuses names that the configuration does not have. transformers would keep them without effect."""
    try:
        config = kind()
    except Exception:  # has no defaults, such as an encoder with a decoder
        return
    known = known_values(config)
    unknown = [key for key in values if key not in known and not key.startswith("_")]
    unknown = [key for key in unknown if not has_effect(kind, values, key)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        names = f"{path}{near[0]}" if near else f"one of {', '.join(sorted(known))}"
        listed = ", ".join(path + key for key in unknown)
        raise Mistake(f"--config {listed}: {kind.__name__} has no such value; fix: {names}, or leave it out")
    for key, part, part_values in config_parts(config, values):
        check_config(part, part_values, f"{path}{key}.")


def transformers_model(name, options):
    package = load("transformers", "transformers")
    try:
        kind = getattr(package, name)
    except (AttributeError, ImportError) as error:
        raise Mistake(
            f"transformers has no class {name} ({error}); fix: a model's class, such as GPT2LMHeadModel"
        ) from None
    if options.set:
        raise Mistake(
            "--set is not for transformers: classes; fix: --config "
            + ",".join(f"{k}={v}" for k, v in options.set.items())
        )
    values = config_values(options.config) if options.config else {}
    if options.pretrained:
        model = call(
            lambda **v: kind.from_pretrained(options.pretrained, **v),
            name,
            values,
            "--config or --pretrained",
        ).train()
    else:
        if not getattr(kind, "config_class", None):
            raise Mistake(
                f"{name} does not say which configuration it has; fix: a model's own class, such as "
                "GPT2LMHeadModel, or --pretrained"
            )
        check_config(kind.config_class, values)
        model = call(lambda **v: kind(kind.config_class(**v)), name, values, "--config")
    return model, transformers_inputs(model)


def transformers_inputs(model):
    """Example inputs of the common kinds, None for others."""
    config, main = model.config, getattr(model, "main_input_name", None)
    if main == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        longest = getattr(config, "max_position_embeddings", None) or LENGTH
        example = ("int64", (BATCH, min(LENGTH, longest)), config.vocab_size)
        names = ["input_ids", *(["decoder_input_ids"] if config.is_encoder_decoder else [])]
        return {name: example for name in names if name in inspect.signature(model.forward).parameters}
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {
            main: (
                "float32",
                (BATCH, getattr(config, "num_channels", 3), config.image_size, config.image_size),
                None,
            )
        }
    return None


def own_model(module_name, maker, options):
    refuse(options.config, "--config", "your own", "--set key=value")
    refuse(
        options.pretrained,
        "--pretrained",
        "your own",
        "load the weights in the function that makes the model",
    )
    module = load(module_name)
    make = getattr(module, maker, None)
    if not callable(make):
        offered = [
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", None) == module_name
        ]
        raise Mistake(
            f"{module_name} has no function or class {maker}; fix: one of {', '.join(offered) or 'its own'}"
        )
    return call(make, maker, options.set, "--set"), getattr(module, "example_inputs", None)


def make_model(source, options):
    """The model of --from, and its example inputs: {name: (dtype, sizes, below)}, a function, or None."""
    package, _, name = source.partition(":")
    if not name or not package:
        raise Mistake(
            f"--from {source} names no model; fix: torchvision:resnet50, timm:NAME, transformers:CLASS, or "
            "my_package.my_module:make_model"
        )
    if package in PACKAGES:
        return {"torchvision": torchvision_model, "timm": timm_model, "transformers": transformers_model}[
            package
        ](name, options)
    return own_model(package, name, options)
