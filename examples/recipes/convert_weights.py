# SPDX-License-Identifier: Apache-2.0
"""Converts a state_dict between torch.save's .pt and safetensors, in the direction that the names' ends say.

usage: convert_weights.py resnet18.pt resnet18.safetensors
       convert_weights.py fine_tuned.safetensors fine_tuned.pt
"""

import sys

import torch
from safetensors.torch import load_file, save_file

source, target = sys.argv[1:]
if source.endswith(".safetensors"):
    torch.save(load_file(source), target)
else:
    state = torch.load(source, map_location="cpu", weights_only=True)
    # safetensors refuses tensors that share memory, such as tied embeddings.
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, target)
