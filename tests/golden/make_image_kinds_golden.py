#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes image_kinds_golden.csv: small image files of every kind, and their pixels according to Pillow.

usage: make_image_kinds_golden.py > image_kinds_golden.csv
It needs Pillow and NumPy; the file was made with 13.0 and 2.4.
Rows: name,width,height, then in hex the file, convert("RGB") and convert("L").
"""

import io
import struct
import zlib

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 15, 10
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def pack_rows(values, depth):
    """Filter 0 and the bits of each row of [height, width, channels]."""
    out = b""
    for row in values.reshape(len(values), -1):
        if depth == 16:
            packed = row.astype(">u2").tobytes()
        else:
            bits = (row[:, None] >> np.arange(depth - 1, -1, -1)) & 1
            packed = np.packbits(bits.astype(np.uint8).ravel()).tobytes()
        out += b"\0" + packed
    return out


def png(kind, depth, interlaced=False, palette=None, transparency=None):
    """Pillow writes few of these kinds."""
    rng = np.random.default_rng(100 * kind + depth)
    limit = len(palette) if palette is not None else 1 << depth
    values = rng.integers(0, limit, (HEIGHT, WIDTH, CHANNELS[kind]))
    if depth == 16:
        values[:, ::2] //= 200  # some below 256
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, kind, 0, 0, int(interlaced))
    if interlaced:
        parts = [values[y::dy, x::dx] for x, y, dx, dy in ADAM7]
    else:
        parts = [values]
    rows = b"".join(pack_rows(part, depth) for part in parts if part.size)
    out = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    if palette is not None:
        out += chunk(b"PLTE", palette.astype(np.uint8).tobytes())
    if transparency is not None:
        out += chunk(b"tRNS", transparency)
    return out + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def picture(width=WIDTH, height=HEIGHT):
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 90 * np.sin(x / 3.0 + c) * np.cos(y / 4.0 - c) + 30 * ((x + y + c) % 2) for c in range(3)]
    return Image.fromarray(np.clip(np.stack(waves, axis=-1), 0, 255).astype(np.uint8))


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def files():
    colours = np.random.default_rng(7).integers(0, 256, (200, 3))
    for depth in (1, 2, 4, 8, 16):
        yield f"png_grey{depth}", png(GREY, depth)
        if depth < 16:
            yield f"png_palette{depth}", png(PALETTE, depth, palette=colours[: 1 << depth])
    yield "png_grey8_colour_key", png(GREY, 8, transparency=struct.pack(">H", 7))
    yield "png_grey16_colour_key", png(GREY, 16, transparency=struct.pack(">H", 7))
    yield "png_palette4_alpha", png(PALETTE, 4, palette=colours[:11], transparency=bytes(range(0, 110, 10)))
    for depth in (8, 16):
        yield f"png_rgb{depth}", png(RGB, depth)
        yield f"png_rgb{depth}_colour_key", png(RGB, depth, transparency=struct.pack(">HHH", 1, 2, 3))
        yield f"png_rgba{depth}", png(RGBA, depth)
        yield f"png_grey_alpha{depth}", png(GREY_ALPHA, depth)
    yield "png_grey16_interlaced", png(GREY, 16, interlaced=True)
    yield "png_rgba8_interlaced", png(RGBA, 8, interlaced=True)
    yield "jpeg_rgb", saved(picture(), "JPEG", quality=90)
    yield "jpeg_grey", saved(picture().convert("L"), "JPEG", quality=90)
    with_alpha = picture()
    with_alpha.putalpha(Image.linear_gradient("L").resize(with_alpha.size))
    yield "webp_lossy", saved(picture(37, 21), "WEBP", quality=80)
    yield "webp_lossy_alpha", saved(with_alpha, "WEBP", quality=80)
    yield "webp_lossless", saved(picture(), "WEBP", lossless=True)
    yield "webp_lossless_alpha", saved(with_alpha, "WEBP", lossless=True, exact=True)
    yield "webp_grey", saved(picture().convert("L"), "WEBP", quality=80)


def main():
    for name, data in files():
        image = Image.open(io.BytesIO(data))
        rgb, grey = (image.convert(mode).tobytes().hex() for mode in ("RGB", "L"))
        print(name, *image.size, data.hex(), rgb, grey, sep=",")


if __name__ == "__main__":
    main()
