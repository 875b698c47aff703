# SPDX-License-Identifier: Apache-2.0
"""Causal attention of transformers without its masks, which torch.export.save refuses: attention itself is
causal then."""

import math
import sys

import torch

from .check import difference, run
from .errors import DoesNotExport, last_lines

NAME = "causal_without_mask"
WINDOWS = ("sliding_window", "attention_chunk_size")
FIX = (
    "fix: export the module without its mask in an own Python module (--from my_package.my_module:make_model)"
)


def hugging_face_parts(module):
    """The outermost models of transformers in the module."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found = []
    for name, part in module.named_modules():
        if isinstance(part, transformers.PreTrainedModel) and not any(
            name.startswith(f"{other}.") or not other for other, _ in found
        ):
            found.append((name, part))
    return [part for _, part in found]


def configurations(parts):
    """Those of the models and of models inside them: a decoder may have a copy of its own."""
    found = [getattr(m, "config", None) for part in parts for m in part.modules()]
    kind = sys.modules["transformers"].PretrainedConfig if parts else ()
    return list({id(config): config for config in found if isinstance(config, kind)}.values())


def is_causal(part):
    return any(getattr(m, "is_causal", False) is True for m in part.modules()) and getattr(
        part, "_supports_sdpa", False
    )


def register():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
    ALL_ATTENTION_FUNCTIONS.register(NAME, sdpa_attention_forward)


def longest(inputs):
    """The greatest length of a text that the export allows."""
    lengths = [
        (getattr(i.dimensions[1], "max", None) or math.inf) if 1 in i.dimensions else i.value.shape[1]
        for i in inputs
        if isinstance(i.value, torch.Tensor) and i.value.dim() >= 2
    ]
    return max(lengths, default=0)


def check_window(config, inputs):
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "layer_types", None)
    if layers and set(layers) == {"full_attention"}:
        return
    for name in WINDOWS:
        window = getattr(config, name, None)
        if window and longest(inputs) > window:
            raise DoesNotExport(
                f"attention sees {name}={window} tokens, and the inputs may have {longest(inputs)}: without "
                "a mask nothing "
                f"limits attention to a window; fix: a length of at most {window}, or an input "
                "attention_mask "
                "(--input 'attention_mask=int64[2,128]<2' for input_ids=int64[2,128]<1000), which keeps the "
                "masks"
            )


def switch_caches_off(parts):
    """Returns what to say about it."""
    switched = [config for config in configurations(parts) if getattr(config, "use_cache", False)]
    for config in switched:
        config.use_cache = False
    return ["the model returns no cache of keys and values"] if switched else []


def leave_masks_out(parts):
    register()
    for config in configurations(parts):
        config._attn_implementation = NAME


def mask_inputs(inputs):
    return [i.name for i in inputs if "attention_mask" in i.name and i.value is not None]


def without_cache(module):
    """The causal models in the module, and what to say about their caches, which are off now."""
    parts = hugging_face_parts(module)
    notes = switch_caches_off(parts)
    return [part for part in parts if is_causal(part)], notes


def configure(module, inputs):
    """Changes a module of Python as prepare() does, without a comparison."""
    causal, _ = without_cache(module)
    if causal and not mask_inputs(inputs):
        leave_masks_out(causal)


def prepare(module, copy, inputs, args, kwargs):
    """Changes the configuration of the causal models in `module`. `copy` makes one of it. Returns what to say
    about it."""
    causal, notes = without_cache(module)
    if not causal:
        return notes
    masks = mask_inputs(inputs)
    if masks:
        return [*notes, f"causal attention keeps its masks, because {masks[0]} is an input"]
    before = copy(module).eval()
    for part in causal:
        check_window(part.config, inputs)
    leave_masks_out(causal)
    after = copy(module).eval()
    names = ", ".join(sorted({type(part).__name__ for part in causal}))
    expected = run(before, args, kwargs)
    try:
        found = run(after, args, kwargs)
    except Exception as error:
        raise DoesNotExport(
            f"{names} does not run without its mask; fix: an input attention_mask, which keeps it. "
            f"Python says: {last_lines(error)}"
        ) from error
    apart = difference(expected, found)
    if apart is None or apart.relative > apart.allowed:
        raise DoesNotExport(
            f"{names} is not only causal: without its mask it computes something else ({apart}); {FIX}"
        )
    return [*notes, f"{names}: attention is causal by itself, without a mask and without padding"]
