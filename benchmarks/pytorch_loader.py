#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of the row jpeg_loader: photographs as batches on the GPU, through DataLoader and PIL.

usage: python3 benchmarks/pytorch_loader.py data=FOLDER batch_size=256 num_workers=16
FOLDER holds train/<class>/*.jpg.

Processes read, decode, crop at random (torchvision's RandomResizedCrop) and flip; bytes go to the GPU out of
page-locked memory and are normalised and cast to bf16 NHWC there, which is faster than floats from the
processes. Rank 0 prints one JSON line; ms is of a batch, the median of `rounds` rounds. A round has processes
of its own, so that none computes while other programs measure; its first `num_workers` batches, in which they
start, are not timed, and at its end they are busy still. Settings are key=value (DEFAULTS); with `gate` (a
folder) each round waits for a file there: see interleaved.py.
"""

import json
import os
import statistics
import sys
import time

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch, which takes its time
    print(__doc__.strip())
    sys.exit(0)
import peer
import torch
import torchvision

DEFAULTS = dict(data="", image_size=224, batch_size=256, num_workers=16)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Endless(torch.utils.data.Sampler):
    """Batches of one random order after the other, without an end between them."""

    def __init__(self, num_images, batch_size):
        self.num_images, self.batch_size = num_images, batch_size

    def __iter__(self):
        left = []
        while True:
            while len(left) < self.batch_size:
                left += torch.randperm(self.num_images).tolist()
            yield left[: self.batch_size]
            left = left[self.batch_size :]


def make_loader(o, device):
    of = torchvision.transforms
    crop = of.Compose([of.RandomResizedCrop(o.image_size), of.RandomHorizontalFlip(), of.PILToTensor()])
    images = torchvision.datasets.ImageFolder(os.path.join(o.data, "train"), crop)
    return torch.utils.data.DataLoader(
        images,
        batch_sampler=Endless(len(images), o.batch_size),
        num_workers=o.num_workers,
        pin_memory=device.type == "cuda",
    )


class Normalize:
    def __init__(self, device):
        self.device = device
        self.mean, self.std = (
            torch.tensor(values, device=device).view(1, 3, 1, 1) * 255 for values in (MEAN, STD)
        )

    def __call__(self, batch):
        images, target = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        images = ((images.float() - self.mean) / self.std).to(torch.bfloat16)
        return images.contiguous(memory_format=torch.channels_last), target


def measure_round(o, loader, to_device, device):
    """Milliseconds of a batch."""
    batches = iter(loader)
    steps = 2 * max(1, o.num_workers)  # processes end their batches together: whole turns of theirs
    for _ in range(max(1, o.num_workers)):
        to_device(next(batches))
    peer.synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        to_device(next(batches))
    peer.synchronize(device)
    return (time.perf_counter() - begin) * 1000 / steps  # `batches` ends here, and its processes with it


def main():
    o = peer.parse(sys.argv[1:], DEFAULTS)
    gate = peer.Gate(o)
    gate.wait("start")
    device, world = peer.setup(o.device)
    to_device = Normalize(device)
    loader = make_loader(o, device)
    to_device(next(iter(torch.utils.data.DataLoader(loader.dataset, o.batch_size))))
    peer.synchronize(device)
    gate.answer("ready", peer.used_mib(device))
    times = []
    for index in range(o.rounds):
        gate.wait(f"go{index}")
        times.append(measure_round(o, loader, to_device, device))
        gate.answer(f"done{index}", times[-1])
    if peer.is_main():
        ms = statistics.median(times)
        print(
            json.dumps(
                dict(
                    impl="pytorch-loader",
                    world=world,
                    batch_size=o.batch_size,
                    num_workers=o.num_workers,
                    ms=round(ms, 4),
                    img_s=round(o.batch_size * world / ms * 1000, 1),
                )
            ),
            flush=True,
        )
    peer.close()


if __name__ == "__main__":
    main()
