#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes image_golden.csv: what Pillow decodes and resizes, from the embedded sample.

usage: make_image_golden.py > image_golden.csv     (needs Pillow; made with 12.x)
Rows: name,left,top,width,height,size,"values …": image 0 of data/cifar10-sample/test-000.tar, the
box of it resized to size x size with BILINEAR; [size, size, 3] bytes. size 0: the decoded box as is.
"""

import io
import os
import tarfile

from PIL import Image

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def main():
    with tarfile.open(os.path.join(ROOT, "data", "cifar10-sample", "test-000.tar")) as archive:
        member = next(m for m in archive if m.isfile())
        image = Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGB")
    for left, top, width, height, size in (
        (0, 0, 32, 32, 0),
        (3, 2, 26, 28, 20),
        (5, 0, 20, 31, 24),
        (0, 0, 32, 32, 7),
    ):
        part = image.crop((left, top, left + width, top + height))
        if size:
            part = part.resize((size, size), Image.BILINEAR)
        print(member.name, left, top, width, height, size, " ".join(map(str, part.tobytes())), sep=",")


if __name__ == "__main__":
    main()
