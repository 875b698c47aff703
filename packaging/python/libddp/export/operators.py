# SPDX-License-Identifier: Apache-2.0
"""Operators that a package registers in Python, and that LibTorch has under another name."""

import torch

# The same arguments and bits. transformers calls its own operator in an export alone.
TWINS = {"transformers::grouped_mm_fallback": torch.ops.aten._grouped_mm.default}


def use_twins(program):
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if isinstance(node.target, torch._ops.OpOverload):
                node.target = TWINS.get(node.target._schema.name, node.target)
