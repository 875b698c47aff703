#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes eval/: small pictures, and what torchvision's evaluation makes of them with Pillow.

usage: make_eval_golden.py FOLDER     (needs Pillow and NumPy; made with 13.0 and 2.4)
Each case is NAME.jpg (or NAME.png under the name .JPEG) and NAME.RESIZE.SIZE.rgb: the picture through
Resize(RESIZE) and CenterCrop(SIZE), as bytes [SIZE, SIZE, 3], by torchvision's rules for sizes and in
Pillow's arithmetic.
"""

import os
import sys

import numpy as np
from PIL import Image

# name, width, height, Resize's argument, CenterCrop's; each length odd and even, both ways round.
CASES = (
    ("wide", 333, 251, 72, 56),
    ("tall", 200, 287, 64, 41),
    ("large", 640, 480, 72, 64),
    ("enlarged", 60, 50, 83, 72),
    ("grey", 211, 160, 60, 53),
    ("progressive", 181, 181, 50, 47),
    ("full", 150, 99, 64, 64),
    ("inks", 160, 120, 50, 44),
    ("png", 170, 130, 64, 56),
    ("palette", 120, 145, 50, 44),
)


def picture(width, height, seed):
    """Waves, edges and a fine pattern: a shift by half a pixel shows."""
    y, x = np.mgrid[0:height, 0:width]
    channels = []
    for c in range(3):
        wave = 60 * np.sin(x / (7.0 + 3 * seed) + c) * np.cos(y / (9.0 + seed) - c)
        edge = np.where((x // 17 + y // 23 + c) % 2 == 0, 45, -45)
        fine = np.where((x + y) % 3 == 0, 12, -6)
        channels.append(128 + wave + edge + fine)
    return Image.fromarray(np.clip(np.stack(channels, axis=-1), 0, 255).astype(np.uint8))


def save(image, name, path):
    if name == "grey":
        image.convert("L").save(path, quality=85)
    elif name == "progressive":
        image.save(path, quality=85, progressive=True)
    elif name == "full":
        image.save(path, quality=85, subsampling=0)
    elif name == "inks":
        image.convert("CMYK").save(path, quality=85)
    elif name == "png":
        alpha = Image.linear_gradient("L").resize(image.size)
        image.putalpha(alpha)
        image.save(path, format="PNG", optimize=True)
    elif name == "palette":
        image.quantize(64).save(path, format="PNG", optimize=True)
    else:
        image.save(path, quality=50 if name == "large" else 85)


def resize(image, size):
    """torchvision.transforms.Resize(size)."""
    width, height = image.size
    short, long = (width, height) if width <= height else (height, width)
    new_long = int(size * long / short)
    wanted = (size, new_long) if width <= height else (new_long, size)
    return image.resize(wanted, Image.BILINEAR)


def center_crop(image, size):
    """torchvision.transforms.CenterCrop(size) of an image that is large enough."""
    width, height = image.size
    top = int(round((height - size) / 2.0))
    left = int(round((width - size) / 2.0))
    return image.crop((left, top, left + size, top + size))


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for seed, (name, width, height, resized, cut) in enumerate(CASES):
        path = os.path.join(folder, name + (".JPEG" if name in ("png", "palette") else ".jpg"))
        save(picture(width, height, seed), name, path)
        shown = center_crop(resize(Image.open(path).convert("RGB"), resized), cut)
        with open(os.path.join(folder, f"{name}.{resized}.{cut}.rgb"), "wb") as out:
            out.write(shown.tobytes())


if __name__ == "__main__":
    main()
