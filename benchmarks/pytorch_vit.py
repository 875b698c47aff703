#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of the Vision Transformers: torchvision's model in plain modules with SDPA,
DistributedDataParallel and a fused AdamW.

usage:
  python3 benchmarks/pytorch_vit.py model=vit_b_16 batch_size=128 step=compile
  torchrun --nproc-per-node=2 benchmarks/pytorch_vit.py model=vit_s_16 batch_size=128

Settings are key=value (see DEFAULTS, and peer.PROTOCOL_DEFAULTS). Rank 0 prints one JSON line. Steps are
measured on one resident random batch; ms is the median of `rounds` means over `steps` steps. peak_mib is
device-wide (cudaMemGetInfo), read after the warm-up. With `gate` (a folder) each round waits for a file
there: see interleaved.py.

step=eager; step=compile (torch.compile of the model; compile=true is the same); step=graph (the whole eager
step, reductions and optimizer included, captured in one CUDA graph by hand and replayed); step=compile_graph
(both). param_dtype=fp32 has bf16 autocast over float32 parameters. param_dtype=bf16 has bf16 parameters
without masters, which is less than libddp's step does.
"""

import json
import os
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch, which takes its time
    print(__doc__.strip())
    sys.exit(0)
import peer
import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = dict(
    model="vit_b_16",
    image_size=224,
    num_classes=1000,
    batch_size=128,
    dtype="bf16",
    param_dtype="fp32",
    channels_last=True,
    step="eager",
    compile=False,
    wrap=True,
    bucket_cap_mb=25.0,
    comm_hook="none",
    powersgd_rank=1,
    gradient_as_bucket_view=True,
    lr=1e-3,
    weight_decay=0.05,
    seed=0,
)
STEPS = ("eager", "compile", "graph", "compile_graph")
# hidden, layers, heads; as in models/vit.cpp
SIZES = dict(vit_ti=(192, 12, 3), vit_s=(384, 12, 6), vit_b=(768, 12, 12), vit_l=(1024, 24, 16))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x):
        batch, seq, dim = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).view(batch, seq, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, eps=1e-6)
        self.self_attention = Attention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim, eps=1e-6)
        # torchvision's dropouts of probability 0 hold the places 2 and 4.
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Identity(), nn.Linear(4 * dim, dim), nn.Identity()
        )
        for layer in (self.mlp[0], self.mlp[3]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x):
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self, seq, dim, layers, heads):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, seq, dim).normal_(std=0.02))
        self.layers = nn.Sequential()
        for index in range(layers):
            self.layers.add_module(f"encoder_layer_{index}", Block(dim, heads))
        self.ln = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x):
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """torchvision's, with its names."""

    def __init__(self, image_size, patch, num_classes, dim, layers, heads):
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.conv_proj = nn.Conv2d(3, dim, patch, stride=patch)
        self.encoder = Encoder(1 + (image_size // patch) ** 2, dim, layers, heads)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(dim, num_classes))
        nn.init.normal_(self.conv_proj.weight, std=self.conv_proj.weight[0].numel() ** -0.5)
        for zero in (self.conv_proj.bias, self.heads.head.weight, self.heads.head.bias):
            nn.init.zeros_(zero)

    def forward(self, images):
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.size(0), -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def make_model(name, image_size, num_classes):
    size, _, patch = name.rpartition("_")
    if size not in SIZES or not patch.isdigit():
        sys.exit(f"model={name}, there are {', '.join(SIZES)}, each with _ and a patch size")
    return VisionTransformer(image_size, int(patch), num_classes, *SIZES[size])


def build(o, device):
    model = make_model(o.model, o.image_size, o.num_classes).to(device)
    if o.param_dtype == "bf16":
        model = model.to(torch.bfloat16)
    if o.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = peer.wrap(o, model, device, gradient_as_bucket_view=o.gradient_as_bucket_view)
    return torch.compile(model) if o.step.startswith("compile") else model


def speed(o, gate, device, world):
    torch.manual_seed(o.seed)
    captured = o.step.endswith("graph")
    if captured:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    model = build(o, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, weight_decay=o.weight_decay, fused=True, capturable=captured
    )
    # As a loader gives them, which autocast need not cast again.
    images = torch.randn(o.batch_size, 3, o.image_size, o.image_size, device=device)
    images = images.to(torch.bfloat16 if "bf16" in (o.dtype, o.param_dtype) else torch.float32)
    if o.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    target = torch.randint(0, o.num_classes, (o.batch_size,), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with peer.autocast("off" if o.param_dtype == "bf16" else o.dtype, device):
            loss = F.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()

    ms, _, peak = peer.measure_rounds(o, gate, device, peer.CapturedStep(step) if captured else step)
    return dict(
        ms=round(ms, 4),
        img_s=round(o.batch_size * world / ms * 1000, 1),
        peak_mib=round(peak),
        host_ms=round(o.host_ms, 4),
        host_us=round(o.host_us, 1),
    )


def main():
    o = peer.parse(sys.argv[1:], DEFAULTS)
    if o.compile and not o.step.startswith("compile"):
        o.step = "compile_graph" if o.step == "graph" else "compile"
    if o.step not in STEPS:
        sys.exit(f"step={o.step}, there are {', '.join(STEPS)}")
    gate = peer.Gate(o)
    gate.wait("start")
    if o.step.endswith("graph"):
        # As PyTorch's notes on CUDA graphs ask of DDP.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    device, world = peer.setup(o.device)
    torch.backends.cudnn.benchmark = True
    result = speed(o, gate, device, world)
    if peer.is_main():
        print(
            json.dumps(
                dict(
                    impl=f"pytorch-{o.step}",
                    model=o.model,
                    world=world,
                    batch_size=o.batch_size,
                    dtype=o.dtype,
                    param_dtype=o.param_dtype,
                    **result,
                )
            ),
            flush=True,
        )
    peer.close()


if __name__ == "__main__":
    main()
