# SPDX-License-Identifier: Apache-2.0
"""Models of different kinds in small sizes, with random weights. make(NAME) returns a Case."""

import dataclasses
import os
import typing

import torch
from torch import nn
from torch.nn import functional as F

Dim = torch.export.Dim
BATCH = int(os.environ.get("BATCH", 0))  # training samples; 0: a few


@dataclasses.dataclass
class Case:
    model: nn.Module
    inputs: tuple
    keywords: dict = dataclasses.field(default_factory=dict)
    shapes: object = None  # dynamic_shapes of the export
    other: tuple = ()  # inputs of the training, in other sizes than the export's
    other_keywords: dict = dataclasses.field(default_factory=dict)
    evaluates: bool = True  # whether eval() follows from the program of training
    batches: int = 1  # step i trains on part i % batches of `other`


def images(model, size, *, batch=4, other=6):
    """A model of images [batch, 3, size, size] with a dynamic batch."""
    return Case(
        model,
        (torch.randn(batch, 3, size, size),),
        shapes=({0: Dim("batch", min=2, max=512)},),
        other=(torch.randn(BATCH or other, 3, size, size),),
    )


def resnet_small():
    from torchvision.models.resnet import BasicBlock, ResNet

    return images(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), 32)


def hugging_face(model, vocab, *, inputs=None):
    """A text model that takes input_ids [batch, length]. Causal models mask inside their attention: the mask
    of transformers is built by code that torch.export does not save."""
    shapes = {"input_ids": {0: Dim("batch", min=2, max=512), 1: Dim("length", min=4, max=32)}}
    ids = inputs or (lambda batch, length: torch.randint(vocab, (batch, length)))
    return Case(
        model, (), {"input_ids": ids(3, 12)}, shapes, other_keywords={"input_ids": ids(BATCH or 4, 16)}
    )


def causal(model):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register("causal_without_mask", lambda *args, **keywords: None)
    ALL_ATTENTION_FUNCTIONS.register("causal_without_mask", sdpa_attention_forward)
    model.config._attn_implementation = "causal_without_mask"
    return model


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return hugging_face(causal(GPT2LMHeadModel(config)), 97)


class UNet(nn.Module):
    """An image segmenter: convolutions down, transposed convolutions up, skips, group and batch norms."""

    def __init__(self):
        super().__init__()

        def block(a, b):
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
                nn.SiLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.GroupNorm(4, b),
                nn.ReLU(inplace=True),
            )

        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join2, self.join1, self.head = block(32, 16), block(16, 8), nn.Conv2d(8, 2, 1)
        self.dropout = nn.Dropout2d(0.2)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.dropout(self.middle(F.max_pool2d(b, 2)))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        a = self.join1(torch.cat([self.up1(b), a], 1))
        return F.interpolate(self.head(a), scale_factor=2.0, mode="bilinear", align_corners=False)


def unet():
    size = Dim("cells", min=2, max=16)
    return Case(
        UNet(),
        (torch.randn(2, 3, 16, 16),),
        shapes=({0: Dim("batch", min=2), 2: 4 * size, 3: 4 * size},),
        other=(torch.randn(BATCH or 3, 3, 24, 24),),
    )


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(48, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens):
        out, (hidden, cell) = self.lstm(self.embedding(tokens))
        out, last = self.gru(out)
        return self.head(out[:, -1]), hidden.sum() + cell.mean() * last.mean()


def lstm():
    return Case(
        Lstm(),
        (torch.randint(50, (3, 7)),),
        shapes=({0: Dim("batch", min=2)},),
        other=(torch.randint(50, (5, 7)),),
    )


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their targets by index_add."""

    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(17, 32), nn.ELU(), nn.Linear(32, 8))
        self.update = nn.GRUCell(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, nodes, edges, weights):
        source, target = edges[0], edges[1]
        for _ in range(2):
            messages = self.message(torch.cat([nodes[source], nodes[target], weights.unsqueeze(1)], 1))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, target, messages), nodes)
        return self.head(self.norm(nodes)).squeeze(-1), torch.zeros(3, device=weights.device).index_add(
            0, target % 3, weights
        )


def graph_network():
    def data(nodes, edges):
        return torch.randn(nodes, 8), torch.randint(nodes, (2, edges)), torch.rand(edges, requires_grad=False)

    nodes, edges = Dim("nodes", min=2), Dim("edges", min=2)
    return Case(GraphNetwork(), data(6, 14), shapes=({0: nodes}, {1: edges}, {0: edges}), other=data(9, 25))


class Pinn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)])
        self.frequency = nn.Parameter(torch.tensor(3.0))

    def forward(self, x, t):
        h = torch.stack([x, t], -1)
        for layer in self.layers[:-1]:
            h = torch.sin(self.frequency * layer(h))
        return self.layers[-1](h).squeeze(-1) * torch.exp(-t.abs())


def pinn():
    n = Dim("n", min=2)
    return Case(
        Pinn(),
        (torch.rand(16), torch.rand(16)),
        shapes=({0: n}, {0: n}),
        other=(torch.rand(33), torch.rand(33)),
    )


class Dlrm(nn.Module):
    """Dense features and bags of categories, and the products between them."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(n, 8, mode=mode) for n, mode in ((20, "sum"), (30, "mean"), (40, "sum"))
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, categories):
        x = self.bottom(dense)
        rows = torch.stack([x] + [bag(categories[:, i]) for i, bag in enumerate(self.bags)], 1)
        products = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, offset=-1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, i, j]], 1))).squeeze(1)


def dlrm():
    def data(batch):
        return torch.randn(batch, 5), torch.randint(20, (batch, 3, 2))

    batch = Dim("batch", min=2)
    return Case(Dlrm(), data(4), shapes=({0: batch}, {0: batch}), other=data(7))


class TwoInputs(nn.Module):
    """Keyword arguments, a constant one, a list and a dict; shared weights, a buffer that is not persistent,
    a frozen part."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.right.weight = self.left.weight
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bilinear = nn.Bilinear(8, 8, 4)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("offset", torch.arange(8.0), persistent=False)

    def forward(self, a, *, b, power=2):
        self.count += 1
        left = self.norm(F.rrelu(self.left(a), training=self.training)) + self.offset
        right = self.frozen(torch.tanh(self.right(b)))
        return {"joined": self.bilinear(left, right) * self.scale, "parts": [left, (right**power).mean()]}


def two_inputs():
    batch = Dim("batch", min=2)
    return Case(
        TwoInputs(),
        (torch.randn(3, 6),),
        {"b": torch.randn(3, 6), "power": 3},
        {"a": {0: batch}, "b": {0: batch}, "power": None},
        (torch.randn(5, 6),),
        {"b": torch.randn(5, 6)},
        evaluates=False,
    )


class Checkpointed(nn.Module):
    """Activation checkpointing, regions without gradient and with autocast, and control flow on sizes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        with torch.no_grad():
            scale = x.std() + 1
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.blocks[0](x / scale)
        y = torch.cond(y.shape[0] > 4, lambda v: v.float() * 2, lambda v: v.float() + 1, (y,))
        return y, x.view(x.shape[0] // 2, -1).logsumexp(1)


def checkpointed():
    pairs = Dim("pairs", min=1, max=16)
    return Case(Checkpointed(), (torch.randn(4, 8),), shapes=({0: 2 * pairs},), other=(torch.randn(6, 8),))


class Siamese(nn.Module):
    """One network for two inputs, a norm under two names, norms without statistics, of instances, and in a
    region."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.same = self.net[1]
        self.plain = nn.BatchNorm1d(8, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(8, track_running_stats=True, affine=True)
        self.inner = nn.BatchNorm1d(8, momentum=0.3)

    def forward(self, a, b):
        a, b = self.net(a), self.net(b)
        with torch.no_grad():
            scale = self.inner(a * 2).square().mean() + 1
        images = self.instance(torch.stack([a, b, a - b], 2))
        return self.plain(a * b) / scale, images.mean(2)


def siamese():
    batch = Dim("batch", min=2)
    return Case(
        Siamese(),
        (torch.randn(3, 6), torch.randn(3, 6)),
        shapes=({0: batch}, {0: batch}),
        other=(torch.randn(5, 6), torch.randn(5, 6)),
    )


class Sample(typing.NamedTuple):
    values: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    loss: torch.Tensor | None
    parts: Sample


class Trees(nn.Module):
    """A named tuple, a dict and a list go in; a dataclass with None and a named tuple comes out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, sample, extra, pair):
        hidden = torch.tanh(self.linear(sample.values)) * sample.weights
        return Scores(
            hidden + extra["bias"] - extra["shift"], None, Sample(pair[0] * hidden.mean(), hidden * pair[1])
        )


def trees():
    if Scores not in torch.utils._pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Scores, serialized_type_name="tests.Scores")
        torch.utils._pytree._register_namedtuple(Sample, serialized_type_name="tests.Sample")
    batch = {0: Dim("batch", min=2)}

    def data(rows):
        return (
            Sample(torch.randn(rows, 6), torch.rand(rows, 4)),
            {"shift": torch.randn(rows, 4), "bias": torch.randn(rows, 4)},
            [torch.randn(rows, 1), torch.randn(rows, 4)],
        )

    return Case(
        Trees(),
        data(3),
        shapes=(Sample(batch, batch), {"shift": batch, "bias": batch}, [batch, batch]),
        other=data(5),
    )


class WithLoss(nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x, y):
        return self.loss(self.model(x), y)


def resnet18_loss():
    """Noisy images of ten patterns, in 16 batches. For loss curves."""
    import torchvision

    y = torch.randint(10, (16 * (BATCH or 8),))
    x = torch.randn(10, 3, 32, 32)[y] + 2 * torch.randn(len(y), 3, 32, 32)
    batch = Dim("batch", min=2, max=512)
    return Case(
        WithLoss(torchvision.models.resnet18(num_classes=10), F.cross_entropy),
        (x[:4], y[:4]),
        shapes=({0: batch}, {0: batch}),
        other=(x, y),
        batches=16,
    )


def gpt2_loss():
    """GPT-2 (124M) on the bytes of this file, in 16 batches. For loss curves."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = causal(GPT2LMHeadModel(GPT2Config(use_cache=False)))
    with open(__file__, "rb") as f:
        text = torch.tensor(list(f.read()))
    starts = torch.randint(len(text) - 129, (16 * (BATCH or 2),))
    rows = torch.stack([text[start : start + 129] for start in starts])
    batch = Dim("batch", min=2, max=512)
    loss = lambda output, y: F.cross_entropy(output.logits.flatten(0, 1), y.flatten())
    return Case(
        WithLoss(model, loss),
        (rows[:4, :-1], rows[:4, 1:]),
        shapes=({0: batch}, {0: batch}),
        other=(rows[:, :-1], rows[:, 1:]),
        batches=16,
    )


def make(name):
    torch.manual_seed(0)
    return globals()[name]()
