# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of the row jpeg_loader: batches without an end, normalised as ours, timed behind those in
which its processes start. Small random images stand for photographs."""

import os
import sys
import time
import types
import unittest

from study_support import ROOT, need

need("torch")
import torch  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
try:
    import torchvision  # noqa: F401
except ImportError:  # only decoding comes from there, which the tests do without
    sys.modules["torchvision"] = types.ModuleType("torchvision")
import peer  # noqa: E402
import pytorch_loader  # noqa: E402

CPU = torch.device("cpu")


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((3, 4, 4), index, dtype=torch.uint8), index


class Loader(unittest.TestCase):
    def test_one_order_follows_the_other_and_each_image_comes_once_in_it(self):
        batches = iter(pytorch_loader.Endless(10, 4))
        drawn = [index for _ in range(5) for index in next(batches)]
        self.assertEqual([sorted(drawn[:10]), sorted(drawn[10:])], [list(range(10))] * 2)
        self.assertNotEqual(drawn[:10], drawn[10:])

    def test_batches_are_normalised_bf16_and_channels_last(self):
        images, target = pytorch_loader.Normalize(CPU)(
            (torch.full((2, 3, 4, 4), 128, dtype=torch.uint8), torch.tensor([1, 2]))
        )
        self.assertEqual((images.dtype, target.tolist()), (torch.bfloat16, [1, 2]))
        self.assertTrue(images.is_contiguous(memory_format=torch.channels_last))
        for channel, (mean, std) in enumerate(zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))):
            self.assertAlmostEqual(images[0, channel, 0, 0].item(), (128 / 255 - mean) / std, delta=2e-3)

    def test_a_round_times_two_turns_of_the_processes_behind_the_first(self):
        for workers, batches in ((0, 3), (2, 6)):
            o = peer.parse([f"num_workers={workers}", "batch_size=4"], pytorch_loader.DEFAULTS)
            loader = torch.utils.data.DataLoader(
                Images(), batch_sampler=pytorch_loader.Endless(10, 4), num_workers=workers
            )
            taken = []
            ms = pytorch_loader.measure_round(o, loader, taken.append, CPU)
            self.assertEqual(len(taken), batches)
            self.assertGreater(ms, 0.2)


if __name__ == "__main__":
    unittest.main()
