# SPDX-License-Identifier: Apache-2.0
"""BERT with its masked-language head as plain PyTorch modules: what transformers' BertForMaskedLM computes,
with SDPA, one product for q, k and v, and no work for masks and token types that the benchmark does not
use."""

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {
    "bert": dict(vocab=30522, width=768, layers=12, heads=12),
    "bert-tiny": dict(vocab=512, width=64, layers=2, heads=4),
}
EPS = 1e-12


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).reshape(batch, seq, width)
        x = self.attention_norm(x + F.dropout(self.attended(y), p))
        y = self.narrow(F.gelu(self.wide(x)))
        return self.norm(x + F.dropout(y, p))


class BertForMaskedLM(nn.Module):
    def __init__(self, vocab, width, layers, heads, positions, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.words = nn.Embedding(vocab, width, padding_idx=0)
        self.positions = nn.Embedding(positions, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if getattr(module, "padding_idx", None) is not None:
            nn.init.zeros_(module.weight[module.padding_idx])

    def logits(self, input_ids):
        positions = self.positions.weight[: input_ids.shape[1]]
        x = self.dropout(self.norm(self.words(input_ids) + positions + self.types.weight[0]))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.transform_norm(F.gelu(self.transform(x))), self.words.weight, self.bias)

    def forward(self, input_ids, labels):
        """The mean loss over all positions."""
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())
