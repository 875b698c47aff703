# SPDX-License-Identifier: Apache-2.0
"""The least time of a training step on one GPU, by class of kernel as step_profile.py has them: for each
convolution, matrix product and attention the longer of its arithmetic at COMPUTE and its bytes at BANDWIDTH,
for everything else its bytes.

What is counted, in 16-bit activations and weights: a convolution reads two and writes one of {input, weights,
output}; the first has no gradient of its input. BatchNorm reads its input for the statistics and once more
with the result; backward reads input, incoming gradient and ReLU's mask of one bit twice and writes the
input's gradient; where a block ends it also reads the shortcut, and adds up two incoming gradients. The first
one's result is pooled before it is written. SGD with momentum reads gradient, master and momentum, writes
master, momentum and the 16-bit weight: 20 bytes. Activations that stay in the cache (32 px images) can be
faster than this.

Transformers: a product is counted like a convolution. Attention has 4 FLOP per channel and pair of tokens in
the forward and 10 in the backward; a causal mask leaves half of the pairs. A norm reads its input and the
residual, and writes their sum and the result. Its backward reads two gradients and the sum, and writes one
gradient. An activation reads its input and writes its result; its backward reads input and gradient, and
writes one gradient. The loss reads the logits and writes their gradient. AdamW reads gradient, master and two
moments, and writes master, moments and the 16-bit weight: 28 bytes. The norm for clipping reads the gradient
again. Dropout, embeddings and sums of biases are not counted."""

COMPUTE = 790e12  # FLOP/s of bf16 products on an H200, as measured on large ones
BANDWIDTH = 4.3e12  # bytes/s
DEPTHS = dict(
    resnet18=(2, 2, 2, 2),
    resnet34=(3, 4, 6, 3),
    resnet50=(3, 4, 6, 3),
    resnet101=(3, 4, 23, 3),
    resnet152=(3, 8, 36, 3),
)


class Step:
    classes = ("conv fprop", "conv dgrad", "conv wgrad", "batch norm", "pool", "optimizer")

    def __init__(self):
        self.us = dict.fromkeys(self.classes, 0.0)
        self.parameters = 0

    def pass_over(self, kind, num_bytes):
        self.us[kind] += num_bytes / BANDWIDTH * 1e6

    def compute(self, kind, flop, num_bytes):
        self.us[kind] += max(flop / COMPUTE, num_bytes / BANDWIDTH) * 1e6

    def convolution(self, batch, channels, size, filters, kernel, stride, input_wants_gradient=True):
        """Returns the size of its output."""
        out = (size - 1) // stride + 1
        weights = channels * filters * kernel * kernel
        flop = 2 * batch * out * out * weights
        num_bytes = 2 * (batch * size * size * channels + weights + batch * out * out * filters)
        for kind in ("conv fprop", "conv wgrad") + (("conv dgrad",) if input_wants_gradient else ()):
            self.compute(kind, flop, num_bytes)
        self.parameters += weights
        return out

    def norm(self, batch, channels, size, bytes_an_element):
        self.pass_over("batch norm", batch * size * size * channels * bytes_an_element)
        self.parameters += 2 * channels


# Bytes an element: statistics + result + backward's reduction + backward's result.
INNER = 2 + 4.125 + 4.125 + 6.125
BLOCK_END = 2 + 6.125 + 8.125 + 6
# Its result is part of BLOCK_END's, which reads it as the shortcut; backward reads the sum.
SHORTCUT = 2 + 0 + 2 + 4


def resnet(model, image_size, stem, batch, num_classes):
    """A training step's microseconds by class (`us`) and the model's number of parameters."""
    step = Step()
    bottleneck = model not in ("resnet18", "resnet34")
    if stem == "cifar":
        size = step.convolution(batch, 3, image_size, 64, 3, 1, input_wants_gradient=False)
        step.norm(batch, 64, size, INNER)
    else:
        size = step.convolution(batch, 3, image_size, 64, 7, 2, input_wants_gradient=False)
        pooled = (size - 1) // 2 + 1
        step.norm(batch, 64, size, 2 + 2 + 2 + 4)  # read, read, read, read and written
        # Result with 1-byte index; both gradients, twice.
        step.pass_over("pool", batch * 64 * pooled * pooled * (3 + 2 * 5))
        size = pooled
    channels = 64
    for stage, depth in enumerate(DEPTHS[model]):
        width, expansion = 64 << stage, 4 if bottleneck else 1
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            before, before_size = channels, size
            if bottleneck:
                step.norm(batch, width, step.convolution(batch, channels, size, width, 1, 1), INNER)
            size = step.convolution(batch, width if bottleneck else channels, size, width, 3, stride)
            step.norm(batch, width, size, INNER)
            channels = width * expansion
            step.convolution(batch, width, size, channels, 1 if bottleneck else 3, 1)
            step.norm(batch, channels, size, BLOCK_END)
            if before != channels or stride > 1:
                step.convolution(batch, before, before_size, channels, 1, stride)
                step.norm(batch, channels, size, SHORTCUT)
    step.parameters += channels * num_classes + num_classes
    step.pass_over("optimizer", 20 * step.parameters)
    # The average over all pixels, read and its gradient written.
    step.pass_over("pool", batch * size * size * channels * 4)
    return step


class Transformer(Step):
    """Layers of `hidden` channels on `batch` rows of `seq` tokens."""

    classes = (
        "attention",
        "layer norm, RMS norm",
        "conv and linear as GEMM",
        "activation",
        "loss",
        "optimizer",
    )

    def __init__(self, batch, seq, hidden):
        super().__init__()
        self.batch, self.seq, self.hidden, self.tokens = batch, seq, hidden, batch * seq

    def product(self, rows, inputs, outputs, is_tied=False, input_wants_gradient=True):
        """With a bias; a tied weight was counted as an embedding."""
        for _ in range(3 if input_wants_gradient else 2):
            self.compute(
                "conv and linear as GEMM",
                2 * rows * inputs * outputs,
                2 * (rows * inputs + inputs * outputs + rows * outputs),
            )
        self.parameters += outputs + (0 if is_tied else inputs * outputs)

    def layer_norm(self, rows):
        self.pass_over("layer norm, RMS norm", 16 * rows * self.hidden)
        self.parameters += 2 * self.hidden

    def activation(self, rows, width):
        self.pass_over("activation", 10 * rows * width)

    def block(self, causal=False, rows=None):
        """`rows` pass what follows the attention (None: all tokens)."""
        hidden, rows = self.hidden, rows or self.tokens
        self.layer_norm(self.tokens)
        self.product(self.tokens, hidden, 3 * hidden)
        pairs, matrix = self.tokens * self.seq / (2 if causal else 1), 2 * self.tokens * hidden
        self.compute("attention", 4 * pairs * hidden, 4 * matrix)
        self.compute("attention", 10 * pairs * hidden, 8 * matrix)
        self.product(rows, hidden, hidden)
        self.layer_norm(rows)
        self.product(rows, hidden, 4 * hidden)
        self.activation(rows, 4 * hidden)
        self.product(rows, 4 * hidden, hidden)

    def finish(self, rows, classes, clipped):
        """The loss over `rows` and the optimizer."""
        self.pass_over("loss", 4 * rows * classes)
        self.pass_over("optimizer", (30 if clipped else 28) * self.parameters)
        return self


def gpt2(batch, seq, vocab=50257):
    step = Transformer(batch, seq, 768)
    step.parameters = (vocab + 1024) * 768 - vocab  # the head has no bias
    for _ in range(12):
        step.block(causal=True)
    step.layer_norm(step.tokens)
    step.product(step.tokens, 768, vocab, is_tied=True)
    return step.finish(step.tokens, vocab, clipped=True)


def bert(batch, seq, vocab=30522):
    """With the masked-language head over all positions."""
    step = Transformer(batch, seq, 768)
    step.parameters = (vocab + 512 + 2) * 768
    step.layer_norm(step.tokens)
    for _ in range(12):
        step.block()
    step.product(step.tokens, 768, 768)
    step.activation(step.tokens, 768)
    step.layer_norm(step.tokens)
    step.product(step.tokens, 768, vocab, is_tied=True)
    return step.finish(step.tokens, vocab, clipped=True)


def vit_b_16(batch, classes=1000):
    """At 224 px. The classifier reads the class token alone, so the last layer needs no other behind its
    attention."""
    step = Transformer(batch, 197, 768)
    step.parameters = (1 + 197) * 768
    step.product(batch * 196, 768, 768, input_wants_gradient=False)
    for _ in range(11):
        step.block()
    step.block(rows=batch)
    step.layer_norm(batch)
    step.product(batch, 768, classes)
    return step.finish(batch, classes, clipped=False)
