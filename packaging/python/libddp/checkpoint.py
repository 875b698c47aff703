# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint of ddp::Checkpointer: the complete state, also if ranks saved parts of it (ZeRO-1).

    import libddp.checkpoint
    state = libddp.checkpoint.load("checkpoints/step_0000000120")
    model.load_state_dict(state["model"])
    state["optimizer"]["state.fc.weight.exp_avg"]

It needs PyTorch and the package safetensors. docs/semantics_training.md describes the files.
"""

import json
import os

import torch
from safetensors import safe_open
from safetensors.torch import load_file

FORMATS = range(1, 4)


def load(folder):
    """The tensors, numbers and texts of each object: {object: {key: value}}. What each rank has for itself,
    for example its random generators, is left out. Raises ValueError if the checkpoint is not complete."""
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    if manifest["format"] not in FORMATS:
        raise ValueError(f"{folder} has format {manifest['format']}, this libddp reads {FORMATS[-1]} at most")
    state = {name: dict(values) for name, values in manifest["values"].items()}
    parts = {}
    for record in manifest["files"]:
        path = os.path.join(folder, record["name"])
        if os.path.getsize(path) != record["size"]:
            raise ValueError(f"{path} has {os.path.getsize(path)} bytes, its manifest says {record['size']}")
        if record.get("has_parts"):
            read_parts(path, parts)
        elif not record["name"].startswith("rank_"):
            read_whole(path, record["name"].removesuffix(".safetensors"), state)
    for (name, key), (tensor, missing) in parts.items():
        if missing.any():
            raise ValueError(f"{folder} lacks {int(missing.sum())} elements of {key} of '{name}'")
        state[name][key] = tensor
    return state


def read_whole(path, name, state):
    prefix = "" if name == "model" else name + "."
    for key, tensor in load_file(path).items():
        state[name][key.removeprefix(prefix)] = tensor


def read_parts(path, parts):
    """Copies the parts in a file into whole tensors: {(object, key): (tensor, missing elements)}."""
    with safe_open(path, "pt") as file:
        for entry in json.loads(file.metadata()["entries"]):
            name, key = entry["object"], f"state.{entry['parameter']}.{entry['slot']}"
            part = file.get_tensor(f"{name}.{key}")
            if (name, key) not in parts:
                whole = torch.empty_strided(entry["sizes"], entry["strides"], dtype=part.dtype)
                parts[name, key] = whole, torch.ones(whole.numel(), dtype=torch.bool)
            whole, missing = parts[name, key]
            elements = slice(entry["begin"], entry["begin"] + part.numel())
            whole.as_strided([whole.numel()], [1])[elements] = part
            missing[elements] = False
