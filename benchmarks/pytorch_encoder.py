# SPDX-License-Identifier: Apache-2.0
"""The reference encoder of cluster_check as plain PyTorch modules: the twin of models/encoder.cpp. Pre-norm
layers without a mask, exact GELU, learned positions, a head of its own, the loss over all positions, no
dropout.

  torchrun --nproc-per-node=1 benchmarks/pytorch_lm.py \\
    model=encoder seq_len=512 batch_size=8 dtype=fp32 clip=0
"""

from torch import nn
from torch.nn import functional as F

SIZES = {
    "encoder": dict(vocab=50257, width=768, layers=12, heads=12),
    "encoder-tiny": dict(vocab=512, width=64, layers=2, heads=4),
}
EPS = 1e-5


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.attended(y)
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, positions):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            else:  # the head
                nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids, labels):
        """The mean loss over all positions."""
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
