#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes sampler_golden.csv from PyTorch's own DistributedSampler.

usage: make_sampler_golden.py > sampler_golden.csv     (needs torch; made with 2.11.0)
A row: size,world_size,rank,shuffle,drop_last,seed,epoch,num_samples,first indices,hash
A list is given as its first 8 indices and a polynomial hash of all of them (mod 2^61 - 1).
"""

import torch
from torch.utils.data import DistributedSampler

PRIME = (1 << 61) - 1


def digest(indices):
    value = 0
    for i in indices:
        value = (value * 1_000_003 + i + 1) % PRIME
    return value


def main():
    cases = []
    for size in (1, 2, 7, 10, 16, 23):
        for world in (1, 2, 3, 4, 8, 30):
            for drop_last in (0, 1):
                for shuffle, seed, epoch in ((0, 0, 0), (1, 0, 0), (1, 0, 3), (1, 42, 0), (1, 7, 100)):
                    cases.append((size, world, shuffle, drop_last, seed, epoch))
    for size, world in ((1000, 7), (50000, 8), (1281167, 3)):
        for drop_last in (0, 1):
            cases += [(size, world, 1, drop_last, 1234567890123, 5)]
    print("# torch", torch.__version__)
    for size, world, shuffle, drop_last, seed, epoch in cases:
        for rank in range(world):
            if world > 4 and rank not in (0, 1, world // 2, world - 1):
                continue
            if size > 100000 and rank:
                continue
            sampler = DistributedSampler(range(size), world, rank, bool(shuffle), seed, bool(drop_last))
            sampler.set_epoch(epoch)
            indices = list(sampler)
            head = " ".join(map(str, indices[:8]))
            print(
                size,
                world,
                rank,
                shuffle,
                drop_last,
                seed,
                epoch,
                len(indices),
                head,
                digest(indices),
                sep=",",
            )


if __name__ == "__main__":
    main()
