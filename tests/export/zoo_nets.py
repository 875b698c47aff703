# SPDX-License-Identifier: Apache-2.0
"""Small networks of the zoo that no package has."""

import torch
from torch import nn
from torch.nn import functional as F


class GruSpeech(nn.Module):
    """Frames of a recording to words: two GRUs, the mean over the frames before each length."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.gru = nn.GRU(8, 16, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, frames, lengths):
        hidden, _ = self.gru(self.norm(frames.transpose(1, 2)).transpose(1, 2))
        inside = torch.arange(frames.shape[1], device=lengths.device) <= lengths.unsqueeze(1)
        weights = inside / inside.sum(1, keepdim=True)
        return self.head((hidden * weights.unsqueeze(2)).sum(1)).log_softmax(1)


class ConvSpeech(nn.Module):
    """Waves to words: strided, dilated, grouped and separable convolutions of one dimension."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 80, stride=16, padding=32)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(16),
                nn.PReLU(16),
                nn.Conv1d(16, 16, 3, padding=2**i, dilation=2**i, groups=16, padding_mode="circular"),
                nn.Conv1d(16, 32, 1),
                nn.GLU(1),
            )
            for i in range(3)
        )
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, 12))

    def forward(self, waves):
        x = self.stem(waves)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.adaptive_max_pool1d(F.lp_pool1d(x, 2.0, 2), 1).squeeze(2))


class Conformer(nn.Module):
    """Frames of any number: attention of torch.nn, a gated convolution, and relative positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.bias = nn.Embedding(17, 4)
        self.gate, self.depthwise = nn.Linear(32, 64), nn.Conv1d(32, 32, 5, padding=2, groups=32)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, frames):
        x = self.layer(self.embed(frames))
        place = torch.arange(frames.shape[1], device=frames.device)
        apart = (place.unsqueeze(0) - place.unsqueeze(1)).clamp(-8, 8) + 8
        bias = self.bias(apart).permute(2, 0, 1).repeat(frames.shape[0], 1, 1)
        x = x + self.attention(x, x, x, attn_mask=bias, need_weights=False)[0]
        y = self.norm(self.depthwise(F.glu(self.gate(x)).transpose(1, 2)))
        return self.head(x + F.silu(y).transpose(1, 2)).log_softmax(2)


class GraphAttention(nn.Module):
    """Attention along edges: a softmax over the edges that enter a node, by scatter_reduce."""

    def __init__(self):
        super().__init__()
        self.value, self.score = nn.Linear(8, 16), nn.Linear(32, 1)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, nodes, edges):
        source, target = edges[0], edges[1]
        values = self.value(nodes)
        pair = torch.cat([values[source], values[target]], 1)
        scores = F.leaky_relu(self.score(pair), 0.2).squeeze(1)
        lowest = torch.full_like(values[:, 0], float("-inf"))
        greatest = lowest.scatter_reduce(0, target, scores.detach(), "amax")
        weights = torch.exp(scores - greatest[target])
        total = torch.zeros_like(values[:, 0]).scatter_add(0, target, weights)
        messages = values[source] * (weights / total[target]).unsqueeze(1)
        return self.head(self.norm(values.index_add(0, target, messages)))


class HeatPinn(nn.Module):
    """The residual of the heat equation, with derivatives of the network written as operators."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 24), nn.Linear(24, 24), nn.Linear(24, 1)
        self.log_diffusion = nn.Parameter(torch.tensor(-1.0))

    def derivatives(self, layer, value, slope, curve, by_time):
        """tanh(layer): its value, and its derivatives by place, by place twice, and by time."""
        h = torch.tanh(layer(value))
        slope, curve, by_time = (x @ layer.weight.t() for x in (slope, curve, by_time))
        rate = 1 - h.square()
        return h, rate * slope, rate * curve - 2 * h * rate * slope.square(), rate * by_time

    def forward(self, points):
        place = torch.tensor([1.0, 0.0], device=points.device).expand_as(points)
        value = points, place, torch.zeros_like(points), place.flip(1)
        for layer in (self.first, self.second):
            value = self.derivatives(layer, *value)
        _, _, curve, by_time = (x @ self.head.weight.t() for x in value)
        return self.head(value[0]), by_time - self.log_diffusion.exp() * curve


class FourierOperator(nn.Module):
    """A Fourier neural operator: complex weights between FFTs of two dimensions."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1)
        self.modes = nn.ParameterList(torch.randn(8, 8, 4, 4, dtype=torch.cfloat) * 0.1 for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))

    def forward(self, fields):
        x = self.lift(fields)
        for weight, local in zip(self.modes, self.local):
            spectrum = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], weight)
            kept = torch.zeros_like(spectrum)
            kept[:, :, :4, :4] = low
            x = F.gelu(torch.fft.irfft2(kept, s=(x.shape[2], x.shape[3])) + local(x))
        return self.head(x), torch.view_as_real(spectrum).abs().mean()


class VariationalCoder(nn.Module):
    """A sample of a normal distribution in training, its mean in evaluation, and their divergence."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Softplus())
        self.mean, self.log_variance = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.Mish(), nn.AlphaDropout(0.1), nn.Linear(24, 12))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden).clamp(-6, 6)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(self.decoder(code), x.sigmoid()) + 0.1 * divergence


class Experts(nn.Module):
    """All experts, of which each row weighs two: top-k, Gumbel softmax, batched products."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 16, 8) * 0.2)

    def forward(self, x):
        scores = self.gate(x)
        if self.training:
            scores = scores + F.gumbel_softmax(scores, tau=0.7)
        weights, chosen = scores.softmax(1).topk(2, dim=1)
        dense = torch.zeros_like(scores).scatter(1, chosen, weights)
        hidden = F.silu(torch.einsum("bi,eio->ebo", x, self.up))
        y = torch.baddbmm(torch.zeros(4, 1, 8, device=x.device), hidden, self.down)
        load = F.one_hot(chosen, 4).float().mean((0, 1))
        return torch.einsum("ebo,be->bo", y, dense), (load * dense.mean(0)).sum()


class Recurrent(nn.Module):
    """Cells in a loop over frames, an LSTM with projections, an RNN with relu, and start states."""

    def __init__(self):
        super().__init__()
        self.cell, self.gate = nn.LSTMCell(8, 12), nn.GRUCell(12, 12)
        self.lstm = nn.LSTM(12, 16, proj_size=6, batch_first=True)
        self.rnn = nn.RNN(6, 5, nonlinearity="relu", bidirectional=True)
        self.start = nn.Parameter(torch.zeros(1, 12))

    def forward(self, frames):
        h = c = self.start.expand(frames.shape[0], 12)
        outputs = []
        for frame in frames.unbind(1):
            h, c = self.cell(frame, (h, c))
            outputs.append(self.gate(h, c))
        y, _ = self.lstm(torch.stack(outputs, 1))
        return self.rnn(y.transpose(0, 1))[0]


class Flow(nn.Module):
    """A normalizing flow: determinants, triangular systems, eigenvalues, and the matrix exponential."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))
        self.lower, self.skew = nn.Parameter(torch.randn(4, 4) * 0.1), nn.Parameter(torch.randn(4, 4) * 0.1)
        self.couple = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        sign, log_volume = torch.linalg.slogdet(self.mix)
        x = x @ self.mix.t() @ torch.linalg.matrix_exp(self.skew - self.skew.t())
        triangle = torch.tril(self.lower, -1) + torch.eye(4, device=x.device)
        x = torch.linalg.solve_triangular(triangle, x.t(), upper=False).t()
        a, b = x.chunk(2, 1)
        scale, shift = self.couple(a).chunk(2, 1)
        y = torch.cat([a, b * scale.tanh().exp() + shift], 1)
        spectrum = torch.linalg.eigvalsh(self.mix @ self.mix.t())
        return y.square().sum(1).mean() - log_volume * sign - scale.tanh().sum(1).mean(), spectrum


class Warp(nn.Module):
    """A spatial transformer: sampled grids, unfolded patches, pixel shuffle, spectral norm."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(3))
        self.affine = nn.Linear(36, 6)
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, padding="same"))
        self.patches = nn.Linear(8 * 9, 8)

    def forward(self, x):
        size = x.shape
        start = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], device=x.device)
        theta = (self.affine(self.where(x).flatten(1)) * 0.1 + start).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(size), align_corners=False)
        y = self.conv(F.grid_sample(x, grid, padding_mode="border", align_corners=False))
        patches = self.patches(F.unfold(y, 3, padding=1, stride=2).transpose(1, 2)).transpose(1, 2)
        y = F.pixel_shuffle(patches.unflatten(2, (size[2] // 2, size[3] // 2)), 2)
        return F.local_response_norm(y, 3), F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2)


class Metric(nn.Module):
    """Losses of pairs, sorts and cumulative sums, and an embedding that limits its norms."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=1.0, scale_grad_by_freq=True)
        self.net = nn.Linear(8, 6)

    def forward(self, ids, values):
        x = self.net(self.embed(ids) + values)
        near = torch.cdist(x, x.roll(1, 0))
        order = near.sort(1, descending=True).values.logcumsumexp(1)
        bins = torch.bucketize(values.sum(1), torch.linspace(-2, 2, 5, device=values.device))
        pairs = (
            F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0))
            + F.cosine_similarity(x, values[:, :6]).mean()
        )
        return pairs, order.cummax(1).values, F.multi_margin_loss(x, bins), near.median(1).values


class Translator(nn.Module):
    """nn.Transformer with a causal mask, and a loss in the graph."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, frames, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=frames.device)
        decoded = self.head(self.net(frames, self.embed(words), tgt_mask=mask, tgt_is_causal=True))
        return F.cross_entropy(decoded.transpose(1, 2), words.roll(-1, 1), label_smoothing=0.1), decoded
