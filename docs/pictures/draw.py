#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README's picture: the page of the run in docs/pictures/quickstart, as a browser shows it.

    docs/pictures/draw.py            draws docs/pictures/run_page.png; needs Chromium or Chrome
    docs/pictures/draw.py --check    compares the picture with the page; needs no browser

The picture holds the SHA-256 of its page. So each change of tools/plot_run.py that changes the page asks for
a new picture.

Exit codes: 0 drawn, or equal, 1 the picture shows another page, 64 a mistake in the call, or no browser.
"""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "tools"))
# pylint: disable=wrong-import-position
from run_page import page  # noqa: E402
from run_page.files import Run  # noqa: E402
from scaling.command_line import Parser  # noqa: E402
from scaling.report import write_page  # noqa: E402

RUN = os.path.join(HERE, "quickstart")
PICTURE = os.path.join(HERE, "run_page.png")
WIDTH, HEIGHT, SCALE = 960, 785, 1.5  # of the window in CSS pixels, and pixels of the picture for each
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEY = b"page"  # of the text in the PNG


def write_run_page(path, run=RUN):
    """Writes the page, and returns its SHA-256."""
    parts = page.make([Run(run)], 1, "tools/plot_run.py docs/pictures/quickstart")
    write_page(path, os.path.basename(run), parts, page.STYLE)
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def current(run=RUN):
    """The SHA-256 of the page that the tool makes now."""
    with tempfile.TemporaryDirectory() as folder:
        return write_run_page(os.path.join(folder, "run.html"), run)


def chunks(png):
    """[(type, data)] of a PNG file."""
    place, found = len(SIGNATURE), []
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        found.append((png[place + 4 : place + 8], png[place + 8 : place + 8 + length]))
        place += length + 12
    return found


def with_digest(png, digest):
    """The PNG file with a text that names its page."""
    *head, end = [chunk for chunk in chunks(png) if chunk[0] != b"tEXt"]
    result = SIGNATURE
    for kind, data in [*head, (b"tEXt", KEY + b"\0" + digest.encode()), end]:
        result += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return result


def digest_of(png):
    """Of the page that the picture shows; empty if it does not say."""
    texts = dict(data.split(b"\0", 1) for kind, data in chunks(png) if kind == b"tEXt")
    return texts.get(KEY, b"").decode()


def screenshot(html, png):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("error: there is no Chromium or Chrome; fix: apt-get install chromium", file=sys.stderr)
        sys.exit(64)
    command = [browser, "--headless=new", "--disable-gpu", "--hide-scrollbars"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root with a sandbox
    command += [f"--force-device-scale-factor={SCALE}", f"--window-size={WIDTH},{HEIGHT}"]
    command += [f"--screenshot={png}", f"file://{html}"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args(arguments).check:
        with open(PICTURE, "rb") as file:
            if digest_of(file.read()) == current():
                return 0
        print("error: docs/pictures/run_page.png shows another page; fix: run docs/pictures/draw.py")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        html, png = os.path.join(folder, "run.html"), os.path.join(folder, "page.png")
        digest = write_run_page(html)
        screenshot(html, png)
        with open(png, "rb") as file:
            drawn = with_digest(file.read(), digest)
    with open(PICTURE, "wb") as file:
        file.write(drawn)
    print(f"picture: {PICTURE}, {len(drawn) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
