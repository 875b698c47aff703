# SPDX-License-Identifier: Apache-2.0
"""The rows of the comparison with PyTorch: what is measured, on how many GPUs, and what was asked of it."""

import dataclasses

import roofline

# The other side, by name: settings of pytorch_resnet.py, which pytorch_vit.py has too.
PEERS = {
    "eager": ["step=eager"],
    "compile": ["step=compile"],
    "graph": ["step=graph"],
    "compile_graph": ["step=compile_graph"],
}
PEER_TITLES = dict(
    eager="PyTorch eager",
    compile="torch.compile",
    graph="PyTorch, hand graph",
    compile_graph="torch.compile, hand graph",
)
DEFAULT_PEERS = tuple(PEERS)
# Ours: settings of bench_resnet.
BEFORE = ("step=eager", "ops=plain", "optimizer=list")
BEST = ("step=graph", "param_dtype=bf16")
BF16_WIRE = ("fp32_grads=false",)


@dataclasses.dataclass(frozen=True)
class Goal:
    """`must` and `aim` in the row's unit, or, with `of_one_gpu`, as a share of the same row's rate on one
    GPU."""

    must: float
    aim: float
    of_one_gpu: bool = False


def of_one_gpu(must, aim):
    return Goal(must, aim, of_one_gpu=True)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Our benchmark of one kind of model, and the PyTorch program that is measured with it."""

    ours: str  # in the build folder's benchmarks/
    peer: str  # in benchmarks/
    peers: dict  # settings of the peer by name of the side
    default_peers: tuple = DEFAULT_PEERS


RESNET = Programs("bench_resnet", "pytorch_resnet.py", PEERS)
VIT = Programs("bench_resnet", "pytorch_vit.py", PEERS, ("eager", "compile", "compile_graph"))
LANGUAGE = Programs(
    "bench_lm", "pytorch_lm.py", dict(eager=[], compile=["compile=true"]), ("eager", "compile")
)
LANGUAGE_ALONE = dataclasses.replace(LANGUAGE, peers={})


@dataclasses.dataclass(frozen=True)
class StepRow:
    """Training steps on one resident random batch, all programs taking turns."""

    title: str
    model: str
    batch_size: int  # of one GPU; with `strong` of all of them together
    sizes: tuple  # further settings of all programs
    unit: str  # img_s, seq_s, tok_s: per second and GPU; ms: milliseconds of a step
    gpus: tuple  # how many it is measured on
    goals: dict = dataclasses.field(default_factory=dict)  # by number of GPUs
    units_per_sample: int = 1  # the length of a row of tokens; also times `accumulate`
    strong: bool = False
    steps: int = 8  # of a round of a captured step
    eager_steps: int = 8  # of a round of a step that the host issues kernel by kernel
    warmup: int = 15
    programs: Programs = RESNET
    peer_settings: tuple = ()  # of all PyTorch sides
    before: tuple = BEFORE  # our plain step, which the others are compared with; empty: there is none
    best: tuple = BEST  # our fastest step, with gradients in 16 bits on the wire too
    # Of ours on several GPUs: buckets by measurement, and reductions of known width, beside which small
    # kernels go on.
    reductions: tuple = ("bucket_cap_mb=auto", "nccl_max_ctas=24")
    in_sequence: bool = (
        False  # a side starts after the previous one ended: together they exceed a GPU's memory
    )
    probe: str = ""  # the emulated step of the same sizes: see emulated.py
    least: object = None  # function of a GPU's batch size that returns a roofline.Step

    def ours(self, gpus):
        """Settings of our sides by name. On several GPUs gradients are sent in 32 bits and in 16."""
        best = list(self.best + (self.reductions if gpus > 1 else ()))
        wire = best + list(BF16_WIRE)
        sides = dict(libddp=best, libddp_bf16_wire=wire) if gpus > 1 else dict(libddp=wire)
        return dict(before=list(self.before), **sides) if self.before else sides

    def peers(self, gpus, chosen=None):
        """Settings of the PyTorch sides by name: of those of `chosen` (None: the usual ones) that the program
        has."""
        # DDP costs something on one GPU too, and there nobody needs it.
        alone = [] if gpus > 1 else ["wrap=false"]
        chosen = self.programs.default_peers if chosen is None else chosen
        return {
            name: self.programs.peers[name] + list(self.peer_settings) + alone
            for name in chosen
            if name in self.programs.peers
        }

    def batch_of_gpu(self, gpus):
        return self.batch_size // gpus if self.strong else self.batch_size

    def settings(self, gpus, own):
        """Of a program whose own settings are `own`."""
        steps = self.steps if any(setting.endswith("graph") for setting in own) else self.eager_steps
        return [
            f"model={self.model}",
            f"batch_size={self.batch_of_gpu(gpus)}",
            *self.sizes,
            f"steps={steps}",
            f"warmup={self.warmup}",
        ]

    def value(self, side, gpus):
        """What was measured, in the row's unit; None where it failed."""
        if "ms" not in side:
            return None
        batch = self.batch_size / gpus if self.strong else self.batch_size
        return side["ms"] if self.unit == "ms" else batch * self.units_per_sample / side["ms"] * 1000

    def higher_is_better(self):
        return self.unit != "ms"

    def least_us(self, gpus):
        """Microseconds by class that a step takes at the least; empty: not known."""
        return self.least(self.batch_of_gpu(gpus)).us if self.least else {}


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """What a program of its own measures: programs.py has a function of the row's name."""

    title: str
    unit: str
    gpus: tuple
    goals: dict
    better: str  # lower, higher
    needs: str = ""  # the option of compare_pytorch without which it cannot run

    def value(self, side, gpus):
        return side.get("value")

    def higher_is_better(self):
        return self.better == "higher"


def resnet(
    title, model, image_size, batch_size, unit, gpus, goals, stem="imagenet", num_classes=10, **options
):
    return StepRow(
        title,
        model,
        batch_size,
        (f"image_size={image_size}", f"stem={stem}", f"num_classes={num_classes}"),
        unit,
        gpus,
        goals,
        **options,
        least=lambda batch: roofline.resnet(model, image_size, stem, batch, num_classes),
    )


def small_images(batch_size, must, aim):
    return resnet(
        f"ResNet-18, 32 px, batch {batch_size}",
        "resnet18",
        32,
        batch_size,
        "ms",
        (1,),
        {1: Goal(must, aim)},
        steps=200,
        eager_steps=40,
        probe="resnet18",
    )


TRANSFORMER_SCALING = {n: of_one_gpu(0.975, 0.985) for n in (2, 4, 8)}
LORA_SCALING = {n: of_one_gpu(0.985, 0.99) for n in (2, 4, 8)}

ROWS = {
    # 1 s and more: until clocks have settled at the power limit.
    "resnet50": resnet(
        "ResNet-50, 224 px, batch 256 per GPU",
        "resnet50",
        224,
        256,
        "img_s",
        (1, 2, 4, 8),
        {
            1: Goal(8500, 9200),
            2: of_one_gpu(0.985, 0.995),
            4: of_one_gpu(0.985, 0.99),
            8: of_one_gpu(0.98, 0.99),
        },
        num_classes=1000,
        steps=60,
        eager_steps=20,
        probe="resnet50",
    ),
    "resnet18_512": small_images(512, 0.85, 0.74),
    "resnet18_128": small_images(128, 0.57, 0.47),
    "resnet18_64": small_images(64, 0.52, 0.38),
    "resnet18_strong": resnet(
        "ResNet-18, 32 px, global batch 512",
        "resnet18",
        32,
        512,
        "ms",
        (2, 4, 8),
        {2: Goal(0.65, 0.58), 4: Goal(0.57, 0.47), 8: Goal(0.50, 0.38)},
        strong=True,
        steps=200,
        eager_steps=40,
    ),
    "resnet18_3x3": resnet(
        "ResNet-18, 3x3 stem, 32 px, global batch 512",
        "resnet18",
        32,
        512,
        "ms",
        (1, 2, 4, 8),
        {4: Goal(1.75, 1.70)},
        strong=True,
        stem="cifar",
        steps=80,
        eager_steps=40,
    ),
    "vit_b_16": StepRow(
        "ViT-B/16, 224 px, batch 256",
        "vit_b_16",
        256,
        ("image_size=224", "num_classes=1000"),
        "img_s",
        (1, 2, 4, 8),
        {1: Goal(4000, 4250), **TRANSFORMER_SCALING},
        steps=20,
        eager_steps=20,
        programs=VIT,
        before=(),
        in_sequence=True,
        least=roofline.vit_b_16,
    ),
}


def language(
    title,
    model,
    batch_size,
    seq_len,
    goal,
    sizes=(),
    best=(),
    accumulate=1,
    unit="tok_s",
    scaling=None,
    **options,
):
    """`goal` is for one GPU; None: there is none. `scaling`: goals for more GPUs, if the row is measured on
    them. `best` follows what our sides of all language models have."""
    sizes = (f"seq_len={seq_len}", *sizes, *((f"accumulate={accumulate}",) if accumulate > 1 else ()))
    options = dict(dict(programs=LANGUAGE, before=(), reductions=()), **options)
    return StepRow(
        title,
        model,
        batch_size,
        sizes,
        unit,
        (1, *(scaling or {})),
        {**({1: goal} if goal else {}), **(scaling or {})},
        units_per_sample=accumulate * (seq_len if unit == "tok_s" else 1),
        best=(*BEST, "bucket_cap_mb=100", *best),
        **options,
    )


def gpt2(title, goal, dropout, **options):
    """PyTorch's vocabulary is padded to a multiple of 64; libddp pads it by itself."""
    return language(
        title,
        "gpt2",
        16,
        1024,
        goal,
        (f"dropout={dropout}",),
        steps=40,
        eager_steps=20,
        peer_settings=("vocab_size=50304",),
        least=lambda batch: roofline.gpt2(batch, 1024),
        **options,
    )


def lora(title, goal, dropout, **options):
    """Qwen2's vocabulary is a multiple of 64."""
    return language(
        title,
        "qwen2-7b",
        2,
        4096,
        goal,
        ("lora_rank=64", "lora_alpha=128", f"lora_dropout={dropout}", "lora_dtype=bf16"),
        steps=6,
        eager_steps=6,
        warmup=6,
        in_sequence=True,
        **options,
    )


def whole_qwen2(title, model, goal, accumulate):
    """PyTorch has four times as many micro-batches of a quarter: the float32 logits of 32 rows do not fit."""
    return language(
        title,
        model,
        32,
        1024,
        goal,
        ("lora_rank=0",),
        accumulate=accumulate,
        steps=2,
        eager_steps=1,
        warmup=5,
        in_sequence=True,
        peer_settings=("batch_size=8", f"accumulate={4 * accumulate}"),
    )


ROWS.update(
    {
        "gpt2": gpt2("GPT-2 124M, 16 x 1,024 tokens", Goal(520e3, 570e3), 0, scaling=TRANSFORMER_SCALING),
        "gpt2_dropout": gpt2("GPT-2 124M, 16 x 1,024 tokens, dropout 0.1", None, 0.1),
        "bert": language(
            "BERT-base, 128 x 128 tokens, loss over all positions, dropout 0.1",
            "bert",
            128,
            128,
            Goal(4700, 5150),
            ("dropout=0.1",),
            unit="seq_s",
            scaling=TRANSFORMER_SCALING,
            steps=50,
            eager_steps=25,
            peer_settings=("vocab_size=30528",),
            least=lambda batch: roofline.bert(batch, 128),
        ),
        "encoder_fp32": language(
            "Reference encoder of cluster_check, 8 x 512 tokens, strict float32",
            "encoder",
            8,
            512,
            Goal(50e3, 55e3),
            ("dtype=fp32", "clip=0"),
            best=("param_dtype=fp32",),
            steps=20,
            eager_steps=20,
        ),
        "encoder_bf16": language(
            "Reference encoder of cluster_check, 8 x 512 tokens, bf16",
            "encoder",
            8,
            512,
            Goal(400e3, 500e3),
            ("dtype=bf16", "clip=0"),
            steps=100,
            eager_steps=100,
        ),
        "qwen2_7b_lora": lora(
            "Qwen2-7B, LoRA r 64, dropout 0.05, 2 x 4,096 tokens",
            Goal(16000, 17500),
            0.05,
            scaling=LORA_SCALING,
        ),
        "qwen2_7b_lora_dropout0": lora("Qwen2-7B, LoRA r 64, 2 x 4,096 tokens", Goal(16800, 17900), 0),
        "qwen2_7b_fp8": lora(
            "Qwen2-7B, LoRA r 64, frozen weights in FP8, 2 x 4,096 tokens",
            Goal(24000, 26500),
            0,
            best=("base_dtype=fp8",),
            programs=LANGUAGE_ALONE,
        ),
        "qwen2_0_5b": whole_qwen2(
            "Qwen2-0.5B, all parameters, 16 x 32 x 1,024 tokens", "qwen2-0.5b", Goal(160e3, 172e3), 16
        ),
        "qwen2_1_5b": whole_qwen2(
            "Qwen2-1.5B, all parameters, 8 x 32 x 1,024 tokens", "qwen2-1.5b", Goal(61e3, 66e3), 8
        ),
    }
)

ROWS.update(
    {
        "cifar10": ProgramRow(
            "CIFAR-10, ResNet-18 with 3x3 stem, 24 epochs, global batch 512, with an evaluation after each",
            "s",
            (1, 2, 4),
            {1: Goal(13.5, 11.8), 4: Goal(4.6, 3.6)},
            "lower",
            needs="cifar10",
        ),
        "resnet50_jpeg": ProgramRow(
            "ResNet-50, 224 px, batch 256 per GPU, fed from JPEG, rate / rate on a resident batch",
            "x",
            (1, 2),
            {1: Goal(0.97, 0.99)},
            "higher",
            needs="photographs",
        ),
        "jpeg_loader": ProgramRow(
            "JPEG loader alone, 224 px, batches of 256 on the GPU",
            "images_s",
            (1,),
            {1: Goal(9000, 12000)},
            "higher",
            needs="photographs",
        ),
        "all_reduce": ProgramRow(
            "all-reduce, 4 MiB to 1 GiB, NCCL time / ours",
            "ratio",
            (2, 4, 8),
            {n: Goal(0.98, 1.0) for n in (2, 4, 8)},
            "higher",
        ),
    }
)
