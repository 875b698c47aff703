# SPDX-License-Identifier: Apache-2.0
"""The rows of the comparison with PyTorch: what is measured, on how many GPUs, and what was asked of it."""
import dataclasses

import roofline


@dataclasses.dataclass(frozen=True)
class Goal:
    """`must` and `aim` in the row's unit, or, with `of_one_gpu`, as a share of the same row's rate on one GPU."""
    must: float
    aim: float
    of_one_gpu: bool = False


@dataclasses.dataclass(frozen=True)
class StepRow:
    """Training steps on one resident random batch, all programs taking turns."""
    title: str
    model: str
    image_size: int
    batch_size: int                 # of one GPU; with `strong` of all of them together
    unit: str                       # img_s: images per second and GPU; ms: milliseconds of a step
    gpus: tuple                     # how many it is measured on
    goals: dict = dataclasses.field(default_factory=dict)  # by number of GPUs
    strong: bool = False
    stem: str = "imagenet"
    num_classes: int = 10
    steps: int = 8                  # of a round: of a captured step, and of one that the host issues kernel by kernel
    eager_steps: int = 8
    probe: str = ""                 # the emulated step of the same sizes: see emulated.py
    # Of ours on several GPUs: buckets by measurement, and reductions of known width, beside which small kernels go on.
    reductions: tuple = ("bucket_cap_mb=auto", "nccl_max_ctas=24")

    def ours(self, gpus):
        """Settings of bench_resnet by name. The first is the plain step, which the others are compared with, the last has
        gradients in 16 bits on the wire too."""
        best = BEST + list(self.reductions if gpus > 1 else ())
        wire = dict(libddp=best, libddp_bf16_wire=best + BF16_WIRE) if gpus > 1 else dict(libddp=best + BF16_WIRE)
        return dict(before=BEFORE, **wire)

    def settings(self, gpus, own):
        """Of a program whose own settings are `own`."""
        batch = self.batch_size // gpus if self.strong else self.batch_size
        steps = self.steps if any(setting.endswith("graph") for setting in own) else self.eager_steps
        return [f"model={self.model}", f"image_size={self.image_size}", f"batch_size={batch}", f"stem={self.stem}",
                f"num_classes={self.num_classes}", f"steps={steps}", "warmup=15"]

    def value(self, side, gpus):
        """What was measured, in the row's unit; None where it failed."""
        if "ms" not in side:
            return None
        batch = self.batch_size / gpus if self.strong else self.batch_size
        return side["ms"] if self.unit == "ms" else batch / side["ms"] * 1000

    def higher_is_better(self):
        return self.unit == "img_s"

    def least_us(self, gpus):
        """Microseconds by class that a step takes at the least."""
        batch = self.batch_size // gpus if self.strong else self.batch_size
        return roofline.resnet(self.model, self.image_size, self.stem, batch, self.num_classes).us


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """What a program of its own measures: programs.py has a function of the row's name."""
    title: str
    unit: str
    gpus: tuple
    goals: dict
    better: str                     # lower, higher
    needs: str = ""                 # the option of compare_pytorch without which it cannot run

    def value(self, side, gpus):
        return side.get("value")

    def higher_is_better(self):
        return self.better == "higher"


def small_images(batch_size, must, aim):
    return StepRow(f"ResNet-18, 32 px, batch {batch_size}", "resnet18", 32, batch_size, "ms", (1,), {1: Goal(must, aim)},
                   steps=200, eager_steps=40, probe="resnet18")


ROWS = {
    "resnet50": StepRow(
        "ResNet-50, 224 px, batch 256 per GPU", "resnet50", 224, 256, "img_s", (1, 2, 4, 8),
        {1: Goal(8500, 9200), **{n: Goal(0.985, 0.995, of_one_gpu=True) for n in (2, 4, 8)}}, num_classes=1000,
        steps=60, eager_steps=20, probe="resnet50"),  # 1 s and more: until clocks have settled at the power limit
    "resnet18_512": small_images(512, 0.85, 0.74),
    "resnet18_128": small_images(128, 0.57, 0.47),
    "resnet18_64": small_images(64, 0.52, 0.38),
    "resnet18_strong": StepRow(
        "ResNet-18, 32 px, global batch 512", "resnet18", 32, 512, "ms", (2, 4, 8),
        {2: Goal(0.70, 0.61), 4: Goal(0.62, 0.50)}, strong=True, steps=200,
        eager_steps=40),
    "resnet18_3x3": StepRow(
        "ResNet-18, 3x3 stem, 32 px, global batch 512", "resnet18", 32, 512, "ms", (1, 2, 4, 8), {4: Goal(1.95, 1.78)},
        strong=True, stem="cifar", steps=80, eager_steps=40,
        reductions=("bucket_cap_mb=auto", "nccl_max_ctas=8", "nccl_algorithm=symmetric")),
}

ROWS.update({
    "cifar10": ProgramRow(
        "CIFAR-10, ResNet-18 with 3x3 stem, 24 epochs, global batch 512, with an evaluation after each",
        "s", (1, 2, 4), {1: Goal(13.5, 11.8), 4: Goal(4.6, 4.0)}, "lower", needs="cifar10"),
    "resnet50_jpeg": ProgramRow(
        "ResNet-50, 224 px, batch 256 per GPU, fed from JPEG, rate / rate on a resident batch", "x", (1, 2), {1: Goal(0.97, 0.99)}, "higher",
        needs="photographs"),
    "jpeg_loader": ProgramRow(
        "JPEG loader alone, 224 px, batches of 256 on the GPU", "images_s", (1,), {1: Goal(9000, 12000)}, "higher",
        needs="photographs"),
    "all_reduce": ProgramRow(
        "all-reduce, 4 MiB to 1 GiB, lowest NCCL time / ours", "ratio", (2, 4, 8),
        {n: Goal(0.98, 1.0) for n in (2, 4, 8)}, "higher"),
})

# The other side, by name: settings of pytorch_resnet.py.
PEERS = {
    "eager": ["step=eager"],
    "compile": ["step=compile"],
    "graph": ["step=graph"],
    "compile_graph": ["step=compile_graph"],
}
PEER_TITLES = dict(eager="PyTorch eager", compile="torch.compile", graph="PyTorch, hand graph",
                   compile_graph="torch.compile, hand graph")
# Ours: settings of bench_resnet.
BEFORE = ["step=eager", "ops=plain", "optimizer=list"]
BEST = ["step=graph", "param_dtype=bf16"]
BF16_WIRE = ["fp32_grads=false"]
