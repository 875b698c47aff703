# SPDX-License-Identifier: Apache-2.0
"""README's picture: it shows the page that the tool makes now, and a change of either is noticed."""

import contextlib
import io
import os
import shutil
import struct
import sys
import tempfile
import unittest
import zlib
from unittest import mock

from study_support import ROOT

sys.path.insert(0, os.path.join(ROOT, "docs/pictures"))
import draw

MOST_BYTES = 200_000


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Pictures(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def check(self):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = draw.main(["--check"])
        return code, printed.getvalue()

    def test_the_picture_shows_the_page_of_now(self):
        self.assertEqual(self.check(), (0, ""))

    def test_the_picture_is_small_and_in_the_readme(self):
        self.assertLess(os.path.getsize(draw.PICTURE), MOST_BYTES)
        with open(draw.PICTURE, "rb") as file:
            kind, header = draw.chunks(file.read())[0]
        self.assertEqual(kind, b"IHDR")
        size = tuple(round(pixels * draw.SCALE) for pixels in (draw.WIDTH, draw.HEIGHT))
        self.assertLessEqual(abs(struct.unpack(">II", header[:8])[1] - size[1]), 1)
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            self.assertIn("](docs/pictures/run_page.png)", file.read())

    def test_a_change_of_the_page_or_of_the_run_is_noticed(self):
        old = "error: docs/pictures/run_page.png shows another page; fix: run docs/pictures/draw.py\n"
        with mock.patch.object(draw.page, "STYLE", draw.page.STYLE + " "):
            self.assertEqual(self.check(), (1, old))
        run = os.path.join(self.folder, "quickstart")
        shutil.copytree(draw.RUN, run)
        self.assertEqual(draw.current(run), draw.current())
        with open(os.path.join(run, "steps.csv"), encoding="utf-8") as file:
            rows = file.read().splitlines()
        with open(os.path.join(run, "steps.csv"), "w", encoding="utf-8") as file:
            file.write("\n".join(rows[:-1]) + "\n")
        self.assertNotEqual(draw.current(run), draw.current())

    def test_a_new_picture_names_its_page(self):
        plain = draw.SIGNATURE + chunk(b"IHDR", b"x" * 13) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
        self.assertEqual(draw.digest_of(plain), "")
        picture = os.path.join(self.folder, "new.png")

        def screenshot(html, png):
            with open(html, encoding="utf-8") as page, open(png, "wb") as file:
                self.assertIn("<h1>quickstart</h1>", page.read())
                file.write(draw.with_digest(plain, "an old one"))

        with mock.patch.multiple(draw, screenshot=screenshot, PICTURE=picture):
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(draw.main([]), 0)
            self.assertEqual(self.check(), (0, ""))
        with open(picture, "rb") as file:
            self.assertEqual(
                [kind for kind, _ in draw.chunks(file.read())], [b"IHDR", b"IDAT", b"tEXt", b"IEND"]
            )

    def test_mistakes(self):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            with (
                mock.patch.object(draw.shutil, "which", lambda name: None),
                self.assertRaises(SystemExit) as end,
            ):
                draw.main([])
            self.assertEqual(end.exception.code, 64)
            with self.assertRaises(SystemExit) as end:
                draw.main(["--what"])
        self.assertEqual(end.exception.code, 64)
        self.assertIn(
            "error: there is no Chromium or Chrome; fix: apt-get install chromium\n", printed.getvalue()
        )


if __name__ == "__main__":
    unittest.main()
