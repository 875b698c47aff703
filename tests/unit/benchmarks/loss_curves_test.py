# SPDX-License-Identifier: Apache-2.0
"""Photographs become a data set; loss curves are compared over whole windows, and one that is too far is a
failure."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import tarfile
import tempfile
import unittest

from study_support import ROOT

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import curves
import photographs

sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("loss_curves", os.path.join(ROOT, "benchmarks", "loss_curves"))
loss_curves = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(loss_curves)


class Photographs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = os.path.join(self.folder.name, "out")

    def tar(self, **members):
        path = os.path.join(self.folder.name, "images.tar")
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo("./" + name.replace("__", "/").replace("_", "."))
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    def test_each_image_of_a_tar_file_is_a_class_and_is_repeated(self):
        source = self.tar(fox_JPEG=b"1", owl_jpg=b"22", notes_txt=b"3")
        self.assertEqual(photographs.prepare(source, self.out, least=5), self.out)
        found = set()
        for path, _, names in os.walk(self.out):
            found.update(os.path.relpath(os.path.join(path, name), self.out) for name in names)
        found.remove(photographs.MANIFEST)
        self.assertEqual(
            found,
            {f"train/{name}/{i}.jpg" for name in ("fox", "owl") for i in range(3)}
            | {"val/fox/0.jpg", "val/owl/0.jpg"},
        )
        with open(os.path.join(self.out, "train", "owl", "2.jpg"), "rb") as f:
            self.assertEqual(f.read(), b"22")
        photographs.prepare(source, self.out, least=5)  # again into the same folder

    def test_a_folder_of_other_images_is_refused(self):
        photographs.prepare(self.tar(fox_jpg=b"1", owl_jpg=b"22"), self.out, least=5)
        for other, least in (
            (dict(fox_jpg=b"1"), 5),
            (dict(fox_jpg=b"1", owl_jpg=b"23"), 5),
            (dict(fox_jpg=b"1", owl_jpg=b"22"), 9),
        ):
            with self.assertRaisesRegex(ValueError, "out holds other images, or not all; remove it"):
                photographs.prepare(self.tar(**other), self.out, least=least)

    def test_images_of_one_name_in_two_folders_are_two_classes(self):
        photographs.prepare(self.tar(a__fox_jpg=b"1", b__fox_jpg=b"2"), self.out, least=2)
        self.assertEqual(sorted(os.listdir(os.path.join(self.out, "val"))), ["a_fox", "b_fox"])
        with self.assertRaisesRegex(ValueError, "fox.jpeg and fox.jpg would be one class, fox"):
            photographs.prepare(self.tar(fox_jpg=b"1", fox_jpeg=b"2"), self.out + "2")

    def test_a_data_set_is_taken_as_it_is_and_nothing_is_refused(self):
        os.makedirs(os.path.join(self.folder.name, "set", "train"))
        self.assertEqual(
            photographs.prepare(os.path.join(self.folder.name, "set"), self.out),
            os.path.join(self.folder.name, "set"),
        )
        with self.assertRaisesRegex(ValueError, "images.tar holds no JPEG image"):
            photographs.prepare(self.tar(notes_txt=b"3"), self.out)


class Curves(unittest.TestCase):
    def test_points_are_means_of_whole_windows(self):
        self.assertEqual(curves.smooth([4, 2, 3, 1, 9], 2), [3, 2])

    def test_a_side_may_be_twice_as_far_as_equal_runs_part_and_no_further(self):
        averaged = dict(plain=[4.0, 2.0], plain_again=[4.0, 2.5], fused=[4.0, 1.0])
        self.assertEqual(
            loss_curves.verdict(averaged),
            ("largest distance from plain: plain_again 0.5000, fused 1.0000; allowed 1.0000", True),
        )
        self.assertFalse(loss_curves.verdict(dict(averaged, fused=[4.0, 0.99]))[1])
        self.assertFalse(loss_curves.verdict(dict(plain=[4.0], fused=[4.0]))[1])

    def test_equal_runs_of_equal_bits_leave_room_for_rounding(self):
        self.assertEqual(curves.allowed([4.0, 2.0], [4.0, 2.0]), 4.0 / 256)

    def test_curves_of_other_lengths_are_refused(self):
        with self.assertRaisesRegex(ValueError, "2 and 1 points"):
            curves.distance([1, 2], [1])

    def test_what_is_written_holds_every_step(self):
        with tempfile.TemporaryDirectory() as out:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                near = curves.write(
                    out, dict(plain=[4, 2, 3, 1], plain_again=[4, 2, 3, 1]), 2, loss_curves.verdict
                )
            self.assertTrue(near)
            self.assertIn("| 1 to 2 | 3.0000 | 3.0000 |", printed.getvalue())
            with open(os.path.join(out, "curves.csv")) as f:
                self.assertEqual(
                    f.read().split(), ["step,plain,plain_again", "1,4,4", "2,2,2", "3,3,3", "4,1,1"]
                )


if __name__ == "__main__":
    unittest.main()
