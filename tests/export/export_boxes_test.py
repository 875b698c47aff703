# SPDX-License-Identifier: Apache-2.0
"""torchvision's operators on boxes, which read any image whose number a box names: export_boxes_test.py"""

import os
import tempfile
import unittest

import export_support  # noqa: F401  (finds the exporter)
import torch
from libddp.export import Mistake, export
from torch import nn


def register_roi_align():
    """torchvision's operator, or one with its name and arguments."""
    try:
        import torchvision  # noqa: F401
    except ImportError:

        @torch.library.custom_op("torchvision::roi_align", mutates_args=())
        def roi_align(
            images: torch.Tensor,
            rois: torch.Tensor,
            spatial_scale: float,
            pooled_height: int,
            pooled_width: int,
            sampling_ratio: int,
            aligned: bool,
        ) -> torch.Tensor:
            return images[rois[:, 0].long(), :, :pooled_height, :pooled_width] * spatial_scale

        @roi_align.register_fake
        def shaped(images, rois, spatial_scale, pooled_height, pooled_width, *_):
            return images.new_empty(len(rois), images.shape[1], pooled_height, pooled_width)


class Boxed(nn.Conv2d):
    def forward(self, x, boxes):
        return torch.ops.torchvision.roi_align(super().forward(x), boxes, 1.0, 2, 2, 1, False)


class Numbered(Boxed):
    def forward(self, x, numbers):
        return super().forward(x, nn.functional.pad(numbers[:, None].float(), (0, 4), value=2.0))


class Boxes(unittest.TestCase):
    def setUp(self):
        register_roi_align()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.options = {
            "path": os.path.join(folder.name, "boxes.pt2"),
            "modes": "train",
            "dynamic_shapes": {},
        }
        self.x = torch.randn(3, 2, 8, 8)

    def test_images_outside_of_the_batch(self):
        for numbers in ([0, 3, 1], [-1, 0, 2]):
            for check in (True, False):
                with self.assertRaisesRegex(Mistake, r"a box of image (3|-1) of 3 images, and .*; fix: "):
                    export(Numbered(2, 2, 1), (self.x, torch.tensor(numbers)), **self.options, check=check)

    def test_numbers_of_images(self):
        summary = str(export(Numbered(2, 2, 1), (self.x, torch.tensor([0, 2, 1])), **self.options))
        self.assertIn("on the example and other values", summary)

    def test_other_values_of_boxes(self):
        boxes = torch.tensor([[0.0, 1, 1, 5, 5], [2, 2, 2, 7, 7], [2, 2, 3, 7, 7]])
        summary = str(export(Boxed(2, 2, 1), (self.x, boxes), **self.options))
        self.assertRegex(summary, "the example only .the module refuses others: .* gets a box of image")


if __name__ == "__main__":
    unittest.main()
