# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of the CIFAR-10 row: nothing remains of its warm-up, and its clock begins behind the first
step, as ours. A linear model on a few random images stands for the network."""

import os
import sys
import tempfile
import time
import types
import unittest

from study_support import ROOT, need

need("torch")
import torch  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
try:
    import torchvision  # noqa: F401
except ImportError:  # only the network comes from there, which the tests replace
    sys.modules["torchvision"] = types.ModuleType("torchvision")
import peer  # noqa: E402
import pytorch_resnet  # noqa: E402

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)
        self.fc = torch.nn.Linear(3072, 10)

    def forward(self, images):
        return self.fc(self.norm(images).flatten(1))


class Cifar10(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        generator = torch.Generator().manual_seed(1)
        for name, num_images in [(f"data_batch_{i}", 8) for i in range(1, 6)] + [("test_batch", 10)]:
            records = torch.randint(0, 256, (num_images, 3073), generator=generator, dtype=torch.uint8)
            records[:, 0] %= 10
            with open(os.path.join(self.folder.name, f"{name}.bin"), "wb") as f:
                f.write(bytes(records.flatten().tolist()))
        self.addCleanup(setattr, pytorch_resnet, "build", pytorch_resnet.build)
        pytorch_resnet.build = lambda o, device: Model()

    def run_of(self, **settings):
        settings = dict(
            dict(cifar10=self.folder.name, batch_size=8, epochs=2, eval_batch_size=4, dtype="off", warmup=3),
            **settings,
        )
        return pytorch_resnet.Cifar10Run(
            peer.parse([f"{k}={v}" for k, v in settings.items()], pytorch_resnet.DEFAULTS), CPU, 1
        )

    def test_nothing_remains_of_the_warm_up(self):
        fresh, warm = self.run_of(), self.run_of()
        memory = [p.data_ptr() for p in warm.model.parameters()]
        warm.warm_up()
        # Where a graph would read them.
        self.assertEqual(memory, [p.data_ptr() for p in warm.model.parameters()])
        for name, value in fresh.model.state_dict().items():
            self.assertTrue(torch.equal(warm.model.state_dict()[name], value), name)
        said = [run.train()["accuracy"] for run in (fresh, warm)]
        self.assertEqual(*said)
        for (name, a), b in zip(fresh.model.state_dict().items(), warm.model.state_dict().values()):
            self.assertTrue(torch.equal(a, b), name)
        self.assertEqual(fresh.model.norm.num_batches_tracked, 10)  # 2 epochs of 40 // 8 steps

    def test_the_first_step_is_told_apart_and_evaluations_count(self):
        run = self.run_of()
        step, evaluate = run.take_step, run.evaluate
        slow = [2.0]

        def first_is_slow():
            time.sleep(slow.pop() if slow else 0)
            step()

        def evaluates_slowly():
            time.sleep(0.05)
            return evaluate()

        run.take_step, run.evaluate = first_is_slow, evaluates_slowly
        said = run.train()
        self.assertGreaterEqual(said["first_step_seconds"], 2.0)
        self.assertLess(said["seconds"], 2.0)
        self.assertGreaterEqual(said["seconds"] - said["train_seconds"], 0.1)  # after each of two epochs

    def test_every_rank_evaluates_its_share(self):
        run = self.run_of()
        whole = run.evaluate()
        hits = []
        for rank in range(3):
            run.rank, run.world = rank, 3
            hits.append(run.evaluate())
        self.assertAlmostEqual(sum(hits), whole)


if __name__ == "__main__":
    unittest.main()
