# SPDX-License-Identifier: Apache-2.0
"""Models, archives, files of tensors and runs for the tests of exported_ddp."""

import os
import subprocess

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

VOCABULARY = 61  # of data/text-sample


class Regression(nn.Module):
    """Two inputs, dropout, and a parameter under two names."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.again = self.second
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, y):
        h = torch.tanh(self.first(torch.cat([x, y], 1)))
        return self.head(self.dropout(torch.tanh(self.again(torch.tanh(self.second(h))))))


class RegressionLoss(Regression):
    def forward(self, x, y, target):
        prediction = super().forward(x, y).squeeze(1)
        return {"prediction": prediction, "loss": F.mse_loss(prediction, target)}


class Pairs(Regression):
    """Exported for two samples or more."""


class Lookup(nn.Module):
    """Takes the numbers 0 to 4."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 1)

    def forward(self, number):
        return self.table(number)


class Segmenter(nn.Module):
    """The classes of pixels, behind another output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, x):
        return {"mean": x.mean(), "classes": self.layers(x)}


class Language(nn.Module):
    """One layer of causal attention."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, 32), nn.Embedding(64, 32)
        self.norm, self.qkv, self.head = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return self.head(x)


class LanguageLoss(Language):
    def forward(self, ids, labels):
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())


class SmallLanguage(Language):
    def __init__(self):
        super().__init__(20)


class SmallLanguageLoss(LanguageLoss):
    def __init__(self):
        super().__init__(20)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 10)

    def forward(self, images):
        return self.head(torch.relu(self.conv(images)).mean((2, 3)))


class ImageLoss(Images):
    def forward(self, images, labels):
        scores = super().forward(images)
        return F.cross_entropy(scores, labels), scores


def export(model, *inputs, shapes=None, dtype=None):
    """Into <model>.pt2, or <model>_<dtype>.pt2."""
    torch.manual_seed(3)
    net, name = model(), model.__name__
    if dtype is not None:
        net, name = net.to(dtype), f"{name}_{dtype}".replace("torch.", "")
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    batch = torch.export.Dim("batch", min=1)
    shapes = shapes or tuple({0: batch} for _ in inputs)
    torch.export.save(torch.export.export(net.train(), inputs, dynamic_shapes=shapes), f"{name}.pt2")


def export_language(model, num_inputs):
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2, max=64)
    inputs = [torch.randint(20, (3, 10)) for _ in range(num_inputs)]  # one tensor twice would be one input
    export(model, *inputs, shapes=tuple({0: batch, 1: length} for _ in range(num_inputs)))


def run_program(ranks, command, timeout):
    """The code and the output of a trainer on this number of ranks."""
    launch = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    done = subprocess.run(
        [*launch, *command], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )
    return done.returncode, done.stdout, done.stderr


def make_files():
    torch.manual_seed(4)
    x, y = torch.randn(500, 2), torch.randn(500, 1)
    target = x[:, 0] * x[:, 1] + torch.sin(y[:, 0])
    parts = {"train": slice(0, 397), "eval": slice(397, 500)}  # no number of ranks divides either
    images = torch.randn(203, 1, 8, 8)
    labels = (images[:, 0] > 0).long() + (images[:, 0] > 1).long()
    labels[:80, :5] = -100  # unevenly, so that ranks count different numbers
    labels[160:, 0] = -100
    for name, rows in parts.items():
        save_file({"x": x[rows], "y": y[rows], "target": target[rows]}, f"{name}.safetensors")
        save_file(
            {"x": x[rows], "y": y[rows], "target": (target[rows] > 0).to(torch.int32)},
            f"{name}_signs.safetensors",
        )
    save_file({"x": images, "labels": labels}, "pixels.safetensors")
    export(Regression, *[torch.randn(4, n) for n in (2, 1)])
    export(RegressionLoss, torch.randn(4, 2), torch.randn(4, 1), torch.randn(4))
    pairs = torch.export.Dim("batch", min=2)
    export(Pairs, *[torch.randn(4, n) for n in (2, 1)], shapes=({0: pairs}, {0: pairs}))
    numbers = torch.arange(50) % 5
    save_file({"number": numbers, "target": torch.randn(50)}, "numbers.safetensors")
    save_file({"number": numbers + numbers // 4 * 3, "target": torch.randn(50)}, "wrong_numbers.safetensors")
    save_file({"x": x.long(), "y": y.long(), "target": target}, "integers.safetensors")
    export(Lookup, numbers)
    export(Segmenter, torch.randn(4, 1, 8, 8))
    export(ImageLoss, torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64))
    export_language(Language, 1)
    export_language(LanguageLoss, 2)
    export_language(SmallLanguage, 1)
    export_language(SmallLanguageLoss, 2)
