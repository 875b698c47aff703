#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes rand_augment_golden.csv: the operations of torchvision's RandAugment on a small Pillow image.

usage: make_rand_augment_golden.py > rand_augment_golden.csv
The file was made with torchvision 0.26, PyTorch 2.11 for AVX2 and Pillow 13.0.
The first row is "image,,,HEX": [25, 25, 3] bytes. Rows "OP,magnitudes,,V0 … V30" are torchvision's magnitudes
at that side, without sign; rows "OP,result,MAGNITUDE,HEX" are the image after an operation with this signed
magnitude.
"""

import numpy as np
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

SIDE = 25
BINS = (9, 30)


def picture():
    """Waves and edges; the channels have different ranges, and one value is frequent."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    channels = []
    for c in range(3):
        wave = (70 - 20 * c) * np.sin(x / (3.0 + c)) * np.cos(y / 4.0 - c)
        edge = np.where((x // 7 + y // 5 + c) % 2 == 0, 35, -35)
        channels.append(np.where(x + y < 8, 120, 125 + 5 * c + wave + edge))
    return Image.fromarray(np.clip(np.stack(channels, axis=-1), 0, 255).astype(np.uint8))


def main():
    image = picture()
    augment = v2.RandAugment()
    print("image,,", image.tobytes().hex(), sep=",")
    for op, (magnitudes_of, signed) in augment._AUGMENTATION_SPACE.items():
        magnitudes = magnitudes_of(augment.num_magnitude_bins, SIDE, SIDE)
        if magnitudes is None:
            used = [0.0]
        else:
            values = [float(value) for value in magnitudes]
            print(op, "magnitudes", "", " ".join(map(repr, values)), sep=",")
            used = []
            for b in BINS:
                used += [values[b], -values[b]] if signed else [values[b]]
        for magnitude in used:
            result = augment._apply_image_or_video_transform(
                image, op, magnitude, InterpolationMode.NEAREST, augment._fill
            )
            print(op, "result", repr(magnitude), result.tobytes().hex(), sep=",")


if __name__ == "__main__":
    main()
