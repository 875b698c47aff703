# SPDX-License-Identifier: Apache-2.0
"""The batches that PyTorch trains on beside libddp's trainers are the library's."""

import os
import sys
import tempfile
import unittest

from study_support import ROOT

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import libddp_batches

SAMPLE = os.path.join(ROOT, "data", "masked-text-sample")


class Batches(unittest.TestCase):
    def test_windows_and_masks_are_the_librarys(self):
        windows = libddp_batches.TokenWindows(SAMPLE, 64)
        masking = libddp_batches.Masking(SAMPLE, seed=3)
        value = 2166136261
        for epoch in 0, 2:
            for row in 0, 7, windows.num_rows - 1:
                for ids in masking.mask(windows.row(row, epoch)[:64], row, epoch):
                    for token in ids:
                        value = (value ^ (token % 2**32)) * 16777619 % 2**32
        self.assertEqual(value, 0xAB4D66E6)  # of tests/unit/data/tokens/token_masking_test.cpp

    def test_random_numbers_are_philox4x32_10(self):
        """The known answers of Random123."""
        rng = libddp_batches.SampleRng(0, 0, 0)
        self.assertEqual([rng.next() for _ in range(4)], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
        self.assertNotEqual(rng.next(), 0x6627E8D5)  # the next block

    def test_images_of_all_files_follow_each_other(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "cifar-10-batches-bin"))
            for i in range(1, 6):
                with open(os.path.join(folder, "cifar-10-batches-bin", f"data_batch_{i}.bin"), "wb") as f:
                    f.write(bytes([i, *[10 * i] * 3072, i + 1, *[11 * i] * 3072]))
            labels, pixels = libddp_batches.read_cifar10(folder)
        self.assertEqual(list(labels), [1, 2, 2, 3, 3, 4, 4, 5, 5, 6])
        self.assertEqual(list(pixels[::3072]), [10, 11, 20, 22, 30, 33, 40, 44, 50, 55])
        self.assertEqual(len(pixels), 10 * 3072)

    def test_an_epoch_leaves_out_the_batch_that_is_not_full(self):
        self.assertEqual(
            [libddp_batches.rows_of_step(step, 7, 3) for step in range(3)],
            [(0, range(0, 3)), (0, range(3, 6)), (1, range(0, 3))],
        )


if __name__ == "__main__":
    unittest.main()
