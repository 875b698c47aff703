#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes functional_golden.csv from torch.distributed.nn.functional over gloo.

usage: make_functional_golden.py > functional_golden.csv     (needs torch; made with 2.11.0)
A row: collective,world_size,rank,result,gradient. Both are lists of numbers, separated by spaces.

Rank r differentiates its own loss sum(coefficients(r) * result + result ** 2). All numbers are multiples of
1/16 and exact. The test computes inputs and coefficients by the same formulas.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.multiprocessing as multiprocessing

COLUMNS = 3
COLLECTIVES = [
    "all_gather",
    "all_reduce_sum",
    "all_reduce_avg",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_sizes",
]


def rows_sent(world_size, sender, receiver):
    return (sender + 2 * receiver) % 3


def num_rows(collective, world_size, rank):
    if collective == "all_to_all_sizes":
        return sum(rows_sent(world_size, rank, to) for to in range(world_size))
    return 2 if collective.startswith("all_") and collective != "all_to_all" else 2 * world_size


def input_of(rank, rows):
    i = torch.arange(rows * COLUMNS)
    return (((i * 7 + rank * 5) % 11 - 5) / 4).view(rows, COLUMNS)


def coefficients(rank, like):
    i = torch.arange(like.numel())
    return (((i * 3 + rank * 7) % 13 - 6) / 4).view(like.shape)


def result_of(collective, x, rank, world_size):
    if collective == "all_gather":
        return torch.cat(functional.all_gather(x))
    if collective == "all_reduce_sum":
        return functional.all_reduce(x.clone())
    if collective == "all_reduce_avg":  # gloo has no mean
        return functional.all_reduce(x.clone()) / world_size
    if collective == "reduce_scatter":  # gloo has none for lists
        return functional.all_reduce(x.clone()).chunk(world_size)[rank]
    if collective == "all_to_all":
        return functional.all_to_all_single(torch.empty_like(x), x)
    sent = [rows_sent(world_size, rank, to) for to in range(world_size)]
    received = [rows_sent(world_size, source, rank) for source in range(world_size)]
    return functional.all_to_all_single(torch.empty(sum(received), COLUMNS), x, received, sent)


def text_of(tensor):
    return " ".join(f"{number:.17g}" for number in tensor.flatten().tolist())


def run(rank, world_size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{world_size}", rank=rank, world_size=world_size
    )
    with open(f"{folder}/{world_size}.{rank}.csv", "w", encoding="utf-8") as file:
        for collective in COLLECTIVES:
            x = input_of(rank, num_rows(collective, world_size, rank)).requires_grad_()
            result = result_of(collective, x, rank, world_size)
            (coefficients(rank, result) * result + result**2).sum().backward()
            print(collective, world_size, rank, text_of(result), text_of(x.grad), sep=",", file=file)
    dist.destroy_process_group()


def main():
    print("# torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2, 4):
            multiprocessing.spawn(run, (world_size, folder), nprocs=world_size)
            for rank in range(world_size):
                with open(os.path.join(folder, f"{world_size}.{rank}.csv"), encoding="utf-8") as file:
                    sys.stdout.write(file.read())


if __name__ == "__main__":
    main()
