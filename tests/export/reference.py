# SPDX-License-Identifier: Apache-2.0
"""Exports a model of models.py into FOLDER/model.pt2, trains it in Python, and writes what exported_case compares.

usage: reference.py FOLDER NAME
"""
import copy
import os
import sys
import time

import torch
from safetensors.torch import save_file
from torch.utils import _pytree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import models  # noqa: E402

LEARNING_RATE = 0.01
STEPS = 10


def leaves_of(output):
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def loss_of(leaves):
    """The same as in exported_case.cpp."""
    loss = None
    for leaf in leaves:
        if leaf.requires_grad:
            part = leaf if leaf.dim() == 0 else leaf.square().mean()
            loss = part if loss is None else loss + part
    return loss


def train(model, inputs, keywords):
    tensors, losses, seconds = {}, [], []
    torch.manual_seed(1)
    for step in range(STEPS):
        start = time.perf_counter()
        leaves = leaves_of(model(*inputs, **keywords))
        loss = loss_of(leaves)
        loss.backward()
        losses.append(loss.detach().float())
        if step == 0:
            tensors.update({f"output.{i:02}": leaf.detach().clone() for i, leaf in enumerate(leaves)})
            tensors.update({f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-LEARNING_RATE)
                    p.grad = None
        seconds.append(time.perf_counter() - start)
    tensors.update({f"after.{name}": value.detach().clone() for name, value in model.state_dict().items()})
    return {**tensors, "losses": torch.stack(losses)}, sorted(seconds)[STEPS // 2]


def main(folder, name):
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    case = models.make(name)
    model = case.model.train()
    program = torch.export.export(copy.deepcopy(model), case.inputs, case.keywords, dynamic_shapes=case.shapes)
    torch.export.save(program, os.path.join(folder, "model.pt2"))
    inputs, keywords = case.other or case.inputs, {**case.keywords, **case.other_keywords}
    tensors, seconds = train(model, inputs, keywords)
    model.eval()
    draws = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and
                not {"train", "training", "dropout_p"} & {a.name for a in node.target._schema.arguments}
                for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    if not draws:
        with torch.no_grad():
            tensors.update({f"eval.{i:02}": leaf for i, leaf in enumerate(leaves_of(model(*inputs, **keywords)))})
    tensors.update({f"input.{i}": value for i, value in enumerate(inputs)})
    tensors.update({f"keyword.{key}": value for key, value in keywords.items() if isinstance(value, torch.Tensor)})
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, os.path.join(folder, "case.safetensors"))
    print(f"{name}: {len(program.graph.nodes)} nodes, {seconds * 1000:.2f} ms a step")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
