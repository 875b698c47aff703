# SPDX-License-Identifier: Apache-2.0
"""The least time that a ResNet's training step can take on one GPU, by class of kernel as step_profile.py has them: for each
convolution the longer of its arithmetic at COMPUTE and its bytes at BANDWIDTH, for everything else its bytes.

What is counted, in 16-bit activations and weights: a convolution reads two and writes one of {input, weights, output}; the
first has no gradient of its input. BatchNorm reads its input for the statistics and once more with the result; backward reads
input, incoming gradient and ReLU's mask of one bit twice and writes the input's gradient; where a block ends it also reads
the shortcut, and adds up two incoming gradients. The first one's result is pooled before it is written. SGD with momentum
reads gradient, master and momentum, writes master, momentum and the 16-bit weight: 20 bytes. Activations that stay in the
cache (32 px images) can be faster than this."""

COMPUTE = 790e12    # FLOP/s of bf16 products on an H200, as measured on large ones
BANDWIDTH = 4.3e12  # bytes/s
DEPTHS = dict(resnet18=(2, 2, 2, 2), resnet34=(3, 4, 6, 3), resnet50=(3, 4, 6, 3), resnet101=(3, 4, 23, 3), resnet152=(3, 8, 36, 3))


class Step:
    def __init__(self):
        self.us = {"conv fprop": 0.0, "conv dgrad": 0.0, "conv wgrad": 0.0, "batch norm": 0.0, "pool": 0.0, "optimizer": 0.0}
        self.parameters = 0

    def pass_over(self, kind, num_bytes):
        self.us[kind] += num_bytes / BANDWIDTH * 1e6

    def convolution(self, batch, channels, size, filters, kernel, stride, input_wants_gradient=True):
        """Returns the size of its output."""
        out = (size - 1) // stride + 1
        weights = channels * filters * kernel * kernel
        flop = 2 * batch * out * out * weights
        num_bytes = 2 * (batch * size * size * channels + weights + batch * out * out * filters)
        for kind in ("conv fprop", "conv wgrad") + (("conv dgrad",) if input_wants_gradient else ()):
            self.us[kind] += max(flop / COMPUTE, num_bytes / BANDWIDTH) * 1e6
        self.parameters += weights
        return out

    def norm(self, batch, channels, size, bytes_an_element):
        self.pass_over("batch norm", batch * size * size * channels * bytes_an_element)
        self.parameters += 2 * channels


# Bytes an element: statistics + result + backward's reduction + backward's result.
INNER = 2 + 4.125 + 4.125 + 6.125
BLOCK_END = 2 + 6.125 + 8.125 + 6
SHORTCUT = 2 + 0 + 2 + 4  # its result is part of BLOCK_END's, which reads it as the shortcut; backward reads the sum


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
        step.pass_over("pool", batch * 64 * pooled * pooled * (3 + 2 * 5))  # result with 1-byte index; both gradients, twice
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
    step.pass_over("pool", batch * size * size * channels * 4)  # the average over all pixels, read and its gradient written
    return step
