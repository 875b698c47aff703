#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of bench_tensors: samples per second of DataLoader(TensorDataset), 784 floats each in
batches of 256.

usage: benchmarks/pytorch_tensors.py
"""

import statistics
import sys
import time

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__.strip())
    sys.exit(0)

import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 60000, 256


def main():
    dataset = TensorDataset(torch.rand(SAMPLES, 784), torch.randint(10, (SAMPLES,)))
    for workers in 0, 1, 2:
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        rates = []
        for _ in range(4):
            begin = time.perf_counter()
            count = sum(len(data) for data, _ in loader)
            rates.append(count / (time.perf_counter() - begin))
        print(f"{workers} workers {statistics.median(rates[1:]):9.0f} samples/s")


if __name__ == "__main__":
    main()
