# SPDX-License-Identifier: Apache-2.0
"""Files of this library's writer load with safetensors.torch, and Python's load there.

usage: python_interchange.py PROGRAM FOLDER
PROGRAM write FILE and PROGRAM check FILE write and check the tensors that `expected` describes.
"""

import subprocess
import sys

try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)


def expected():
    dtypes = {
        "uint8": torch.uint8,
        "int8": torch.int8,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
        "uint16": torch.uint16,
        "uint32": torch.uint32,
        "uint64": torch.uint64,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }
    tensors = {
        name: torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype) for name, dtype in dtypes.items()
    }
    tensors["bool"] = torch.arange(5) % 2 == 0
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    return tensors


program, folder = sys.argv[1:]
ours, theirs = folder + "/interchange_ours.safetensors", folder + "/interchange_theirs.safetensors"
subprocess.run([program, "write", ours], check=True)
loaded = load_file(ours)
assert loaded.keys() == expected().keys(), loaded.keys() ^ expected().keys()
for name, tensor in expected().items():
    got = loaded[name]
    assert got.dtype == tensor.dtype and got.shape == tensor.shape, (name, got.dtype, got.shape)
    assert torch.equal(
        got.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
    ), name
save_file(expected(), theirs, {"note": "from python"})
subprocess.run([program, "check", theirs], check=True)
print("interchange in both directions:", len(loaded), "tensors")
