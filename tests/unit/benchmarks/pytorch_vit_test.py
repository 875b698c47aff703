# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of the ViT benchmark is torchvision's model: the same state dict gives the same outputs."""

import os
import sys
import unittest

from study_support import ROOT, need

need("torch")
need("torchvision")
import torch  # noqa: E402
import torchvision  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import pytorch_vit  # noqa: E402


class Model(unittest.TestCase):
    def test_it_is_torchvisions(self):
        torch.manual_seed(1)
        theirs = torchvision.models.VisionTransformer(32, 16, 3, 3, 192, 768, num_classes=7)
        ours = pytorch_vit.VisionTransformer(32, 16, 7, 192, 3, 3)
        with torch.no_grad():
            for value in theirs.parameters():
                value.add_(torch.randn_like(value), alpha=0.1)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        images = torch.randn(4, 3, 32, 32)
        expected = theirs(images)
        self.assertLessEqual((ours(images) - expected).abs().max(), 1e-5 * expected.abs().max())

    def test_sizes(self):
        with torch.device("meta"):
            model = pytorch_vit.make_model("vit_b_16", 224, 1000)
        self.assertEqual(86567656, sum(p.numel() for p in model.parameters()))
        with self.assertRaises(SystemExit):
            pytorch_vit.make_model("vit_h_14", 224, 1000)


if __name__ == "__main__":
    unittest.main()
