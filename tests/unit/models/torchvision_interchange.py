# SPDX-License-Identifier: Apache-2.0
"""Torchvision's weights give torchvision's outputs here, and a checkpoint of ours loads there.

usage: torchvision_interchange.py PROGRAM
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torchvision
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)


def resnet18():
    return torchvision.models.resnet18()


def vit_b_16():
    return torchvision.models.vit_b_16(image_size=96)


def fill(model):
    """Values as in a trained model: a new one has trivial norms, and a new ViT a head of zeros."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.LayerNorm)):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
        if isinstance(model, torchvision.models.VisionTransformer):
            for name, value in model.named_parameters():
                if name.endswith("bias") or name == "class_token":
                    value.normal_(0, 0.1)
            model.heads.head.weight.normal_(0, 0.05)


def exchange(make, program):
    torch.manual_seed(1)
    theirs = make()
    fill(theirs)
    theirs.eval()
    images = torch.randn(4, 3, 96, 96)
    with torch.no_grad():
        expected = theirs(images)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save_file(theirs.state_dict(), folder / "weights.safetensors")
        save_file({"input": images}, folder / "input.safetensors")
        subprocess.run(
            [
                program,
                make.__name__,
                folder / "weights.safetensors",
                folder / "input.safetensors",
                folder / "output.safetensors",
                folder / "checkpoints",
            ],
            check=True,
        )
        output = load_file(folder / "output.safetensors")["output"]
        error = (output - expected).abs().max().item() / expected.abs().max().item()
        assert error <= 1e-5, (make.__name__, error)

        back = make()
        saved = load_file(folder / "checkpoints" / "step_0000000001" / "model.safetensors")
        back.load_state_dict(saved, strict=True)
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[key], tensor), key
    print(
        f"{make.__name__}: largest difference of the outputs: {error} of the largest output; {len(saved)} "
        "tensors came back"
    )


for model in (resnet18, vit_b_16):
    exchange(model, sys.argv[1])
