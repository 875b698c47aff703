#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of every figure: torchvision's ResNet with torch.nn.parallel.DistributedDataParallel.

usage:
  torchrun --nproc-per-node=2 benchmarks/pytorch_resnet.py model=resnet50 image_size=224 batch_size=256
  python3 benchmarks/pytorch_resnet.py model=resnet18 image_size=32 batch_size=512 step=graph
  python3 benchmarks/pytorch_resnet.py cifar10=PATH stem=cifar batch_size=512 epochs=24
The last one gives seconds and accuracy of the same recipe as libddp's.

Settings are key=value (see DEFAULTS, and peer.PROTOCOL_DEFAULTS). Rank 0 prints one JSON line. The speed mode
measures steps on one resident random batch; ms is the median of `rounds` means over `steps` steps. Peak
memory is device-wide (cudaMemGetInfo), read after the warm-up: caching allocators do not give memory back.
With `gate` (a folder) each round waits for a file there: see interleaved.py.

step=eager; step=compile (torch.compile of the model); step=graph (the whole eager step, reductions and
optimizer included, captured in one CUDA graph by hand and replayed); step=compile_graph (both). All have
NHWC, bf16 autocast over float32 parameters and the fused optimizer.
"""

import functools
import json
import os
import pathlib
import sys
import time

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch, which takes its time
    print(__doc__.strip())
    sys.exit(0)
import peer
import pytorch_unet
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision

DEFAULTS = dict(
    model="resnet50",
    stem="imagenet",
    image_size=224,
    num_classes=1000,
    batch_size=256,
    dtype="bf16",
    channels_last=True,
    step="eager",
    wrap=True,
    bucket_cap_mb=25.0,
    comm_hook="none",
    powersgd_rank=1,
    find_unused_parameters=False,
    gradient_as_bucket_view=True,
    fused=True,
    accumulate=1,
    cifar10="",
    epochs=24,
    eval_batch_size=1000,
    lr=0.4,
    momentum=0.9,
    nesterov=True,
    weight_decay=5e-4,
    decay_norm_and_bias=True,
    label_smoothing=0.0,
    pct_start=0.25,
    div_factor=10.0,
    final_div_factor=1000.0,
    cutout=0,
    seed=0,
)
STEPS = ("eager", "compile", "graph", "compile_graph")
MEAN = torch.tensor([0.4914, 0.4822, 0.4465])
STD = torch.tensor([0.2470, 0.2435, 0.2616])


def build(o, device):
    make = pytorch_unet.unet if o.model == "unet" else getattr(torchvision.models, o.model)
    model = make(num_classes=o.num_classes)
    if o.stem == "cifar":
        model.conv1 = torch.nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
        torch.nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = torch.nn.Identity()
    model = model.to(device)
    if o.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = peer.wrap(
        o,
        model,
        device,
        find_unused_parameters=o.find_unused_parameters,
        gradient_as_bucket_view=o.gradient_as_bucket_view,
    )
    return torch.compile(model) if o.step.startswith("compile") else model


def make_optimizer(o, model, lr):
    groups = [dict(params=list(model.parameters()))]
    if not o.decay_norm_and_bias:
        groups = [
            dict(params=[p for p in model.parameters() if p.dim() > 1]),
            dict(params=[p for p in model.parameters() if p.dim() <= 1], weight_decay=0.0),
        ]
    extra = dict(fused=True) if o.fused else {}
    return torch.optim.SGD(
        groups, lr=lr, momentum=o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay, **extra
    )


def train_step(o, model, optimizer, device, images, target):
    optimizer.zero_grad(set_to_none=True)
    for index in range(o.accumulate):
        with peer.no_sync(o, model, index):
            with peer.autocast(o.dtype, device):
                loss = F.cross_entropy(model(images), target, label_smoothing=o.label_smoothing)
            (loss / o.accumulate if o.accumulate > 1 else loss).backward()
    optimizer.step()
    return loss


def speed(o, gate, device, world):
    torch.manual_seed(o.seed)
    captured = o.step.endswith("graph")
    if captured:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    model = build(o, device)
    optimizer = make_optimizer(o, model, 0.1)
    # As a loader gives them, which autocast need not cast again.
    images = torch.randn(o.batch_size, 3, o.image_size, o.image_size, device=device).to(
        torch.bfloat16 if o.dtype == "bf16" else torch.float32
    )
    if o.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    target = torch.randint(0, o.num_classes, (o.batch_size,), device=device)
    step = lambda: train_step(o, model, optimizer, device, images, target)
    ms, _, peak = peer.measure_rounds(o, gate, device, peer.CapturedStep(step) if captured else step)
    return dict(
        ms=round(ms, 4),
        img_s=round(o.batch_size * o.accumulate * world / ms * 1000, 1),
        peak_mib=round(peak),
        host_ms=round(o.host_ms, 4),
        host_us=round(o.host_us, 1),
    )


def load_cifar10(path, device):
    def read(names):
        rows = [
            torch.frombuffer(bytearray(pathlib.Path(path, n).read_bytes()), dtype=torch.uint8) for n in names
        ]
        rows = torch.cat(rows).view(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32).to(device), rows[:, 0].long().to(device)

    return read([f"data_batch_{i}.bin" for i in range(1, 6)]), read(["test_batch.bin"])


@functools.cache
def mean_and_std(device):
    """In device memory once: a copy of them in each step would hold up the host."""
    return MEAN.to(device).view(1, 3, 1, 1), STD.to(device).view(1, 3, 1, 1)


def normalize(images, device):
    mean, std = mean_and_std(device)
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augment(o, images, generator):
    n, device = images.size(0), images.device
    padded = F.pad(images, (4, 4, 4, 4))
    dy, dx = (torch.randint(0, 9, (n,), device=device, generator=generator) for _ in range(2))
    flip = torch.rand(n, device=device, generator=generator) < 0.5
    rows = dy[:, None] + torch.arange(32, device=device)
    columns = torch.arange(32, device=device).expand(n, 32)
    columns = torch.where(flip[:, None], 31 - columns, columns) + dx[:, None]
    index = torch.arange(n, device=device)
    out = padded.permute(0, 2, 3, 1)[index[:, None, None], rows[:, :, None], columns[:, None, :]]
    return out.permute(0, 3, 1, 2)


def cutout(o, images, generator):
    n, device = images.size(0), images.device
    cy, cx = (torch.randint(0, 32, (n, 1), device=device, generator=generator) for _ in range(2))
    r = torch.arange(32, device=device)
    half = o.cutout // 2
    inside = lambda c: (r >= c - half) & (r < c + half)
    return images.masked_fill((inside(cy)[:, None, :, None] & inside(cx)[:, None, None, :]), 0)


class Cifar10Run:
    """Training on images in device memory with an evaluation after each epoch, in which every rank takes its
    share."""

    def __init__(self, o, device, world):
        o.num_classes, o.image_size = 10, 32
        torch.manual_seed(o.seed)
        self.o, self.device, self.world = o, device, world
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.captured = o.step.endswith("graph")
        if self.captured:
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        (self.train_x, self.train_y), (self.test_x, self.test_y) = load_cifar10(o.cifar10, device)
        self.per_epoch = self.train_x.size(0) // (o.batch_size * world)
        self.model = build(o, device)
        # A captured step reads the rate that the schedule set.
        self.optimizer = make_optimizer(
            o, self.model, torch.tensor(o.lr, device=device) if self.captured else o.lr
        )
        self.images = self.target = None
        step = lambda: train_step(o, self.model, self.optimizer, device, self.images, self.target)
        self.take_step = peer.CapturedStep(step) if self.captured else step

    def order(self, epoch):
        return torch.randperm(
            self.train_x.size(0), generator=torch.Generator().manual_seed(self.o.seed + epoch)
        ).to(self.device)

    def train_on(self, order, step, generator):
        first = (step * self.world + self.rank) * self.o.batch_size
        take = order[first : first + self.o.batch_size]
        images = normalize(augment(self.o, self.train_x[take], generator), self.device)
        if self.o.cutout:
            images = cutout(self.o, images, generator)
        if self.images is None or not self.captured:
            self.images, self.target = images, self.train_y[take]
        else:  # where the graph reads them
            self.images.copy_(images)
            self.target.copy_(self.train_y[take])
        self.take_step()

    def evaluate(self):
        """The share of the test images that all ranks together classify rightly."""
        mine = slice(self.rank, None, self.world)
        test_x, test_y = self.test_x[mine], self.test_y[mine]
        hits = torch.zeros((), dtype=torch.long, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for first in range(0, test_x.size(0), self.o.eval_batch_size):
                with peer.autocast(self.o.dtype, self.device):
                    logits = self.model(
                        normalize(test_x[first : first + self.o.eval_batch_size], self.device)
                    )
                hits += (logits.argmax(1) == test_y[first : first + self.o.eval_batch_size]).sum()
        self.model.train()
        if dist.is_initialized():
            dist.all_reduce(hits)
        return hits.item() / self.test_x.size(0)

    def warm_up(self):
        """Steps and an evaluation that nothing remains of: libraries are loaded, cuDNN chooses, compilers
        compile, the graph is captured. The model's state is written back where it lies, for a graph reads it
        there; a momentum of zeros is as good as none."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.train()
        for step in range(self.o.warmup):
            self.train_on(
                self.order(0), step % self.per_epoch, torch.Generator(self.device).manual_seed(self.o.seed)
            )
        self.evaluate()
        self.model.load_state_dict(state)
        for values in self.optimizer.state.values():
            values["momentum_buffer"].zero_()

    def train(self):
        """The clock of `seconds` runs from the end of the first step to the end of the last evaluation."""
        o, device = self.o, self.device
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            o.lr,
            total_steps=o.epochs * self.per_epoch,
            pct_start=o.pct_start,
            div_factor=o.div_factor,
            final_div_factor=o.final_div_factor,
            cycle_momentum=False,
        )
        generator = torch.Generator(device).manual_seed(o.seed + 1000 * self.rank)
        begin, evaluation, accuracy = time.perf_counter(), 0.0, 0.0
        for epoch in range(o.epochs):
            order = self.order(epoch)
            for step in range(self.per_epoch):
                self.train_on(order, step, generator)
                schedule.step()
                if epoch == 0 and step == 0:
                    peer.synchronize(device)
                    first_step, begin = time.perf_counter() - begin, time.perf_counter()
            peer.synchronize(device)
            evaluation_begin = time.perf_counter()
            accuracy = self.evaluate()
            evaluation += time.perf_counter() - evaluation_begin
        seconds = time.perf_counter() - begin
        return dict(
            accuracy=accuracy,
            seconds=round(seconds, 3),
            train_seconds=round(seconds - evaluation, 3),
            first_step_seconds=round(first_step, 3),
        )


def accuracy(o, device, world):
    run = Cifar10Run(o, device, world)
    run.warm_up()
    result = run.train()
    run.take_step = None  # a graph that lives holds up the end of NCCL's communicator, whose calls it has
    return result


def main():
    o = peer.parse(sys.argv[1:], DEFAULTS)
    if o.step not in STEPS:
        sys.exit(f"step={o.step}, there are {', '.join(STEPS)}")
    gate = peer.Gate(o)
    gate.wait("start")
    if o.step.endswith("graph"):
        # As PyTorch's notes on CUDA graphs ask of DDP.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    device, world = peer.setup(o.device)
    torch.backends.cudnn.benchmark = True
    result = accuracy(o, device, world) if o.cifar10 else speed(o, gate, device, world)
    if peer.is_main():
        print(
            json.dumps(
                dict(
                    impl=f"pytorch-{o.step}",
                    model=o.model,
                    stem=o.stem,
                    world=world,
                    batch_size=o.batch_size,
                    dtype=o.dtype,
                    **result,
                )
            ),
            flush=True,
        )
    peer.close()


if __name__ == "__main__":
    main()
