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

torch.manual_seed(1)
theirs = torchvision.models.resnet18()
with torch.no_grad():  # running statistics of a trained model are not those of a new one
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.1)
theirs.eval()
images = torch.randn(4, 3, 96, 96)
with torch.no_grad():
    expected = theirs(images)

with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    save_file(theirs.state_dict(), folder / "weights.safetensors")
    save_file({"input": images}, folder / "input.safetensors")
    subprocess.run([sys.argv[1], folder / "weights.safetensors", folder / "input.safetensors",
                    folder / "output.safetensors", folder / "checkpoints"], check=True)
    output = load_file(folder / "output.safetensors")["output"]
    error = (output - expected).abs().max().item() / expected.abs().max().item()
    assert error <= 1e-5, error

    back = torchvision.models.resnet18()
    saved = load_file(folder / "checkpoints" / "step_0000000001" / "model.safetensors")
    back.load_state_dict(saved, strict=True)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
print("largest difference of the outputs:", error, "of the largest output;", len(saved), "tensors came back")
