# SPDX-License-Identifier: Apache-2.0
"""exported_ddp gives the numbers of Python's own training: each kind of exported model with the features of
the matrix in docs/exported_results.md.

usage: exported_matrix_test.py PROGRAM RANKS KIND…

The reference is one process of Python on the batches of all ranks. It sums the losses of all targets and
divides by their number, so it also is the reference of uneven batches, micro-batches and ranks.
"""

import copy
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import typing
import unittest

try:
    import torch
    from exported_ddp_models import Language, export, export_language, run_program
    from safetensors.torch import load_file, save_file
    from torch import nn
    from torch.nn import functional as F
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM, RANKS, KINDS = os.path.abspath(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
del sys.argv[1:]
STEPS, BATCH, LENGTH = 6, 10, 16
LR, IGNORED = 0.05, -100
RANK, ALPHA = 4, 8  # of adapters


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for a in (3, 8)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Blocks(nn.Module):
    """The classes of points, and the weighted mean of their losses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x, target):
        for block in self.blocks:
            x = x + block(x)
        return {"loss": F.cross_entropy(self.head(x), target), "x": x}


class Pixels(nn.Module):
    """The classes of pixels; some have none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh()) for _ in range(1))
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(nn.Module):
    """A linear layer with an adapter in PEFT's layout."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.lora_B(self.lora_A(x)) * (ALPHA / RANK)


@dataclasses.dataclass
class Kind:
    """A model with its first weights."""

    model: nn.Module
    archive: str
    rows: tuple  # (inputs, targets) of all samples
    loss: typing.Callable  # of the model, inputs and targets: the sum over the counted targets
    settings: list
    blocks: str  # the pattern of checkpoint_blocks
    trained: typing.Callable = lambda: load_file("trained.safetensors")
    has_averages: bool = True


def cross_entropy_sum(model, inputs, targets):
    return F.cross_entropy(
        model(inputs).movedim(1, -1).flatten(0, -2).float(),
        targets.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
    )


def images():
    torch.manual_seed(5)
    count = 60
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (count,))
    folder = pathlib.Path("cifar-10-batches-bin")
    folder.mkdir()
    records = torch.cat([labels[:, None].to(torch.uint8), pixels.flatten(1)], 1)
    for i in range(5):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(records[12 * i : 12 * (i + 1)].numpy().tobytes())
    (folder / "test_batch.bin").write_bytes(records[:10].numpy().tobytes())
    export(Images, torch.randn(4, 3, 32, 32))
    settings = ["data.path=.", "data.augment=none", "data.mean=0.5,0.5,0.5", "data.std=0.25,0.25,0.25"]
    return Kind(
        made(Images),
        "Images.pt2",
        ((pixels / 255 - 0.5) / 0.25, labels),
        cross_entropy_sum,
        settings,
        "blocks.*",
    )


def in_graph():
    torch.manual_seed(5)
    x, target = torch.randn(60, 6), torch.randint(3, (60,))
    save_file({"x": x, "target": target}, "points.safetensors")
    export(Blocks, torch.randn(4, 6), torch.randint(3, (4,)))

    def loss(model, inputs, targets):
        return model(inputs, targets)["loss"].float() * len(targets)

    settings = [
        "model.loss=in_graph",
        "tensors.path=points.safetensors",
        "tensors.eval_path=points.safetensors",
    ]
    return Kind(made(Blocks), "Blocks.pt2", (x, target), loss, settings, "blocks.*")


def pixels():
    torch.manual_seed(5)
    x = torch.randn(60, 1, 6, 6)
    target = torch.randint(3, (60, 6, 6))
    target[::3, :4] = IGNORED  # ranks and micro-batches count different numbers
    save_file({"x": x, "target": target}, "pixels.safetensors")
    export(Pixels, torch.randn(4, 1, 6, 6))
    settings = ["tensors.path=pixels.safetensors", "tensors.eval_path=pixels.safetensors"]
    return Kind(made(Pixels), "Pixels.pt2", (x, target), cross_entropy_sum, settings, "blocks.*")


def language():
    folder = pathlib.Path("tokens")
    folder.mkdir()
    source = ROOT / "data/text-sample"
    for name in ("train", "eval", "vocabulary"):
        (folder / f"{name}.safetensors").symlink_to(source / f"{name}.safetensors")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from libddp_batches import TokenWindows

    windows = TokenWindows(folder, LENGTH)
    rows = torch.tensor([windows.row(i, 0) for i in range(60)])
    export_language(Language, 1)
    settings = ["tokens.path=tokens", f"tokens.max_seq_len={LENGTH}"]
    rows = rows[:, :-1], rows[:, 1:]

    def loss(model, inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten(), reduction="sum")

    return Kind(made(Language), "Language.pt2", rows, loss, settings, "qkv", has_averages=False)


def adapters():
    kind = language()
    kind.model.requires_grad_(False)
    layers = ("qkv", "head")
    torch.manual_seed(6)
    names = {}
    for layer in layers:
        adapted = Adapted(getattr(kind.model, layer))
        nn.init.normal_(adapted.lora_B.weight, std=0.02)
        setattr(kind.model, layer, adapted)
        for half in "AB":
            names[f"{layer}.lora_{half}.weight"] = f"base_model.model.{layer}.lora_{half}.weight"
    first = pathlib.Path("first")
    first.mkdir()
    save_file(
        {theirs: kind.model.get_parameter(ours).detach() for ours, theirs in names.items()},
        first / "adapter_model.safetensors",
    )
    (first / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": layers, "bias": "none"}
        )
    )

    def trained():
        file = load_file("last/adapter_model.safetensors")
        return {ours: file[theirs] for ours, theirs in names.items()}

    kind.trained = trained
    kind.settings += [
        f"lora.rank={RANK}",
        f"lora.alpha={ALPHA}",
        "lora.dropout=0",
        f"lora.target_modules=[{','.join(layers)}]",
        "lora.adapter=first",
        "lora.save_dir=last",
    ]
    return kind


def made(model):
    torch.manual_seed(3)  # as export() does
    return model().train()


@dataclasses.dataclass
class Features:
    """Of one run. `tolerance` is that of a loss; ten times it is that of weights, in parts of the way
    that they went."""

    settings: list = dataclasses.field(default_factory=list)
    batch: int = BATCH  # of all ranks and one micro-batch
    accumulated: int = 1
    decay: float = 0.0  # of averages
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    sync_batch_norm: bool = False
    tolerance: float = 1e-5


def buffers_of(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def train_in_python(kind, features):
    """The losses of the steps, and the trained tensors, or their averages."""
    model = copy.deepcopy(kind.model).to(features.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in trained]
    optimizer = torch.optim.SGD(masters, LR, momentum=0.9)
    averages = {name: value.detach().clone() for name, value in model.state_dict().items()}
    losses, position = [], 0
    for _ in range(STEPS):
        total, count = 0.0, 0
        for _ in range(features.accumulated):
            places = range(position, position + features.batch)
            position += features.batch
            before = buffers_of(model)
            for rank in range(1 if features.sync_batch_norm else RANKS):
                rows = torch.tensor(places if features.sync_batch_norm else places[rank::RANKS])
                inputs, targets = (values[rows] for values in kind.rows)
                inputs = inputs.to(features.dtype) if inputs.is_floating_point() else inputs
                kept = buffers_of(model) if rank > 0 else None
                if rank > 0:  # rank 0 sends its buffers
                    model.load_state_dict(before, strict=False)
                with torch.autocast("cpu", torch.bfloat16, enabled=features.autocast):
                    loss = kind.loss(model, inputs, targets)
                loss.backward()
                if rank > 0:
                    model.load_state_dict(kept, strict=False)
                total += loss.item()
                count += (targets != IGNORED).sum().item()
        for parameter, master in zip(trained, masters, strict=True):
            master.grad = parameter.grad.float() / count
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    averages[name] += (1 - features.decay) * (value - averages[name])
                else:
                    averages[name] = value.clone()
        losses.append(total / count)
    return losses, averages


class Matrix:
    """The tests of one kind: a class below adds `make`, which makes it in the working folder."""

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.folder = tempfile.TemporaryDirectory()
        os.chdir(cls.folder.name)
        cls.kind = cls.make()

    @classmethod
    def tearDownClass(cls):
        os.chdir("/")
        cls.folder.cleanup()

    def run_program(self, name, features, *settings, code=0):
        command = [
            PROGRAM,
            "context.device=cpu",
            f"model.path={self.kind.archive}",
            "sampler.shuffle=false",
            "loader.num_workers=0",
            f"loader.global_batch_size={features.batch}",
            f"train.grad_accum_steps={features.accumulated}",
            f"train.max_steps={STEPS}",
            "train.eval_every=0",
            "model.save_weights=trained.safetensors",
            "metrics.dir=runs",
            f"metrics.run_name={name}",
            "metrics.log_every=1",
            "metrics.progress=plain",
            "optimizer.momentum=0.9",
            f"lr_schedule.lr={LR}",
            *self.kind.settings,
            *features.settings,
            *settings,
        ]
        ended, out, errors = run_program(RANKS, command, timeout=100)
        self.assertEqual(ended, code, out[-2000:] + errors[-2000:])
        return out + errors

    def check(self, features):
        """The curve and the weights of the run that wrote them last."""
        name = self.id().split(".")[-1]
        rows = pathlib.Path("runs", name, "steps.csv").read_text().splitlines()
        losses = [float(row.split(",")[2]) for row in rows[1:]]
        expected, tensors = train_in_python(self.kind, features)
        self.assertEqual(len(losses), STEPS)
        for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
            self.assertAlmostEqual(
                ours, theirs, delta=features.tolerance * theirs, msg=f"step {step}: {losses}, {expected}"
            )
        first, trained = self.kind.model.state_dict(), self.kind.trained()
        weights = {name for name, _ in self.kind.model.named_parameters()} & trained.keys()
        self.assertGreater(len(weights), 0)
        for names in filter(None, (weights, trained.keys() - weights)):
            ours, theirs, before = (
                torch.cat([values[name].float().flatten() for name in sorted(names)])
                for values in (trained, tensors, first)
            )
            way, distance = (theirs - before).norm().item(), (theirs - ours).norm().item()
            self.assertLessEqual(distance, 10 * features.tolerance * way)
            print(f"{len(names)} tensors went {way:.2g}, {distance:.1e} from Python's")

    def run_and_check(self, features):
        self.run_program(self.id().split(".")[-1], features)
        self.check(features)

    def all_features(self, *settings, **fields):
        """Three and two samples on two ranks, in two micro-batches."""
        settings = [*settings, f"model.checkpoint_blocks=[{self.kind.blocks}]", "optimizer.zero1=true"]
        settings += ["model.ema_decay=0.5"] if self.kind.has_averages else []
        decay = 0.5 if self.kind.has_averages else 0.0
        return Features(settings, batch=5, accumulated=2, decay=decay, **fields)

    def test_float32(self):
        self.run_and_check(Features())

    def test_all_features_and_resumed(self):
        features, name = self.all_features("checkpoint.dir=checkpoints"), self.id().split(".")[-1]
        self.run_program(name, features, f"train.max_steps={STEPS // 2}")
        self.assertIn("resumed", self.run_program(name, features))
        self.check(features)

    def test_autocast(self):
        self.run_and_check(self.all_features("amp.dtype=bf16", autocast=True, tolerance=2e-3))

    def test_bf16_parameters(self):
        """A loss of bfloat16 has 8 bits."""
        self.run_and_check(self.all_features("model.dtype=bf16", dtype=torch.bfloat16, tolerance=2**-7))

    def test_batch_norms_over_all_ranks(self):
        if self.make is not images:
            self.skipTest("has no batch norm")
        self.run_and_check(Features(["model.sync_batch_norm=true"], batch=9, sync_batch_norm=True))

    def test_averages_of_tokens_are_refused(self):
        if self.kind.has_averages:
            self.skipTest("has averages")
        output = self.run_program("averages", Features(["model.ema_decay=0.5"]), code=64)
        self.assertIn("model.ema_decay is not available for tokens", output)


for name in KINDS:
    bases, members = (Matrix, unittest.TestCase), {"make": staticmethod(globals()[name])}
    globals()[f"Matrix_{name}"] = type(f"Matrix_{name}", bases, members)

if __name__ == "__main__":
    unittest.main(verbosity=2)
