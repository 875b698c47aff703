# SPDX-License-Identifier: Apache-2.0
"""20 steps of optimizer.type=muon and of torch.optim.Muon, from the same weights and gradients on the CPU.

Weights and momentum have equal bits where LibTorch multiplies one bfloat16 matrix with the bits of a batch:
torch.optim.Muon uses mm, libddp bmm. Elsewhere a product may round in another direction, and Newton-Schulz
multiplies this. Then the weights differ by at most 2 % of their way.

usage: muon_torch_test.py PROGRAM
"""

import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors.torch import load_file, save_file

    Muon = torch.optim.Muon
except (ImportError, AttributeError) as error:
    print("skipped:", error)
    sys.exit(77)

SHAPES = {
    "tall": (48, 20),
    "wide": (20, 48),
    "square": (32, 32),
    "tall2": (48, 20),
    "row": (1, 9),
    "zero": (5, 7),
    "large": (96, 192),
}
NUM_STEPS = 20
LR, WEIGHT_DECAY = 0.03125, 0.125  # exact in float32, as libddp rounds the rate

program = sys.argv[1]
generator = torch.Generator().manual_seed(3)
weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
gradients = [
    {name: torch.randn(shape, generator=generator) * (name != "zero") for name, shape in SHAPES.items()}
    for _ in range(NUM_STEPS)
]


def products_are_equal():
    for rows, cols in SHAPES.values():
        x = torch.randn(min(rows, cols), max(rows, cols), generator=generator).bfloat16()
        gram = x @ x.T
        same = torch.equal(torch.bmm(x[None], x[None].mT)[0], gram)
        same &= torch.equal(torch.baddbmm(x[None], gram[None], x[None])[0], torch.addmm(x, gram, x))
        if not same:
            return False
    return True


def in_python(nesterov, scale):
    parameters = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimizer = Muon(
        parameters.values(), lr=LR, weight_decay=WEIGHT_DECAY, nesterov=nesterov, adjust_lr_fn=scale
    )
    for step in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        optimizer.step()
    found = {f"weight.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        found[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
    return found


def in_libddp(folder, nesterov, scale):
    tensors = {f"weight.{name}": weight for name, weight in weights.items()}
    for index, step in enumerate(gradients):
        tensors |= {f"grad.{index}.{name}": gradient for name, gradient in step.items()}
    save_file(tensors, folder + "/input")
    words = [folder + "/input", folder + "/output", str(nesterov).lower(), scale, LR, WEIGHT_DECAY]
    subprocess.run([program, *map(str, words)], check=True)
    return load_file(folder + "/output")


exact = products_are_equal()
for nesterov, scale in ((True, "original"), (False, "match_rms_adamw")):
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = in_libddp(folder, nesterov, scale), in_python(nesterov, scale)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for key, expected in theirs.items():
        if exact or key.startswith("momentum."):
            assert torch.equal(ours[key], expected), (nesterov, scale, key)
            continue
        way = (expected - weights[key.removeprefix("weight.")]).norm()
        assert (ours[key] - expected).norm() <= 0.02 * way, (nesterov, scale, key)
print("20 steps of torch.optim.Muon", "with equal bits" if exact else "within 2 %")
