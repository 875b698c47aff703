#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes this folder's waveforms.safetensors: 960 noisy waveforms of four classes. Standard library only.

usage: make_waveforms.py OUT.safetensors

A detector records 96 samples of noise of standard deviation 1. Class 0 is noise alone. The others hold a
signal of random time, amplitude, frequency and phase: 1 a Gaussian pulse of either sign, 2 a chirp, whose
frequency and amplitude rise until it stops, 3 a damped oscillation.
"""

import json
import math
import random
import struct
import sys

NUM_WAVEFORMS, LENGTH, NUM_CLASSES = 960, 96, 4


def pulse(draw):
    centre, width = draw.uniform(12, 84), draw.uniform(1.5, 4)
    sign = draw.choice((-1, 1))
    return lambda t: sign * math.exp(-(((t - centre) / width) ** 2) / 2)


def chirp(draw):
    end, duration = draw.uniform(50, 92), draw.uniform(35, 50)
    first, last, phase = draw.uniform(0.02, 0.05), draw.uniform(0.2, 0.3), draw.uniform(0, 2 * math.pi)

    def value(t):
        x = (t - end + duration) / duration  # 0 to 1 within the chirp
        cycles = duration * (first * x + (last - first) * x * x / 2)
        return (0.3 + 0.7 * x) * math.sin(phase + 2 * math.pi * cycles) if 0 <= x <= 1 else 0

    return value


def damped_oscillation(draw):
    start, decay = draw.uniform(5, 50), draw.uniform(8, 20)
    frequency, phase = draw.uniform(0.06, 0.2), draw.uniform(0, 2 * math.pi)
    return lambda t: (
        math.exp((start - t) / decay) * math.sin(phase + 2 * math.pi * frequency * (t - start))
        if t >= start
        else 0
    )


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    draw = random.Random(1)
    values, labels = [], []
    for i in range(NUM_WAVEFORMS):
        label = i % NUM_CLASSES
        amplitude = draw.uniform(3, 6)
        signal = (lambda _t: 0, *(make(draw) for make in (pulse, chirp, damped_oscillation)))[label]
        values += [amplitude * signal(t) + draw.gauss(0, 1) for t in range(LENGTH)]
        labels.append(label)
    waveforms, target = struct.pack(f"<{len(values)}e", *values), struct.pack(f"<{len(labels)}i", *labels)
    end = len(waveforms) + len(target)
    header = json.dumps(
        {
            "waveform": {
                "dtype": "F16",
                "shape": [NUM_WAVEFORMS, 1, LENGTH],
                "data_offsets": [0, len(waveforms)],
            },
            "target": {"dtype": "I32", "shape": [NUM_WAVEFORMS], "data_offsets": [len(waveforms), end]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    with open(sys.argv[1], "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + waveforms + target)


if __name__ == "__main__":
    main()
