# SPDX-License-Identifier: Apache-2.0
"""The rows of compare_trainers: a trainer with one of examples/configs, and the benchmark of the same step. A
row has the name of its configuration. This module also prepares data and reads step times from run folders.

These configurations have no row. vit_sample, cnn_sample, bert_sample, gpt2_sample, lora_small, lora_tiny and
quickstart are for laptops. gpt2_medium, gpt2_large, gpt2_xl, qwen2_1_5b_full and llama_full are larger sizes
of programs that have a row.
"""

import array
import dataclasses
import json
import math
import os
import subprocess
import sys

import photographs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path += [os.path.join(ROOT, "tools"), os.path.join(ROOT, "data")]
from scaling import numbers  # noqa: E402
from token_files import serialize  # noqa: E402

MUST = 0.98
# These first steps choose buckets and capture graphs. A run of less than 120 steps has a third of its steps.
WARMUP = 40
QWEN2_VOCABULARY = "151936"

# The benchmarks' settings by the trainers' settings of the same meaning.
COMMON = {
    "train.batch_size": "batch_size",
    "model.dtype": "param_dtype",
    "ddp.bucket_cap_mb": "bucket_cap_mb",
    "ddp.fp32_grads": "fp32_grads",
    "context.device": "device",
    "context.communicator.nccl_max_ctas": "nccl_max_ctas",
}
IMAGES = {
    **COMMON,
    "model.name": "model",
    "model.stem": "stem",
    "model.channels_last": "channels_last",
    "data.image_size": "image_size",
    "data.num_classes": "num_classes",
}
LANGUAGE = {
    **COMMON,
    "train.grad_accum_steps": "accumulate",
    "train.max_grad_norm": "clip",
    "tokens.max_seq_len": "seq_len",
    "model.dropout": "dropout",
    "model.vocab_size": "vocab_size",
    "model.layers": "num_layers",
    "model.hidden": "hidden_size",
    "model.heads": "num_heads",
    "optimizer.weight_decay": "weight_decay",
    "lora.rank": "lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.dtype": "lora_dtype",
}
# Settings that change a step and that a benchmark may lack.
STEP_SETTINGS = (
    "train.label_smoothing",
    "train.mixup",
    "train.cutmix",
    "train.max_grad_norm",
    "model.ema_decay",
    "model.stochastic_depth",
)


@dataclasses.dataclass(frozen=True)
class Row:
    program: str  # the trainer, in the build folder's examples/
    benchmark: tuple  # settings of the benchmark that the configuration does not imply
    needs: str = ""  # the option that gives the data; empty: the row needs none
    own: tuple = ()  # settings of the trainer beside the configuration
    shared: tuple = ()  # a setting and its value on one GPU; n GPUs have 1 / n of it
    steps: int = 300
    tokenizer: tuple = ()  # options of data/prepare_text.py
    repeats: bool = True  # whether tokens are repeated until an epoch is as long as the run
    remark: str = ""

    def benchmark_program(self):
        return "bench_resnet" if self.program in ("resnet_ddp", "vit_ddp") else "bench_lm"

    def data_setting(self):
        return "tokens.path" if self.needs in ("text", "conversations") else "data.path"

    def equivalents(self):
        return IMAGES if self.benchmark_program() == "bench_resnet" else LANGUAGE


def cifar10(program, benchmark, steps):
    return Row(
        program,
        benchmark,
        "cifar10",
        ("data.image_size=32", "data.num_classes=10"),
        ("train.batch_size", 512),
        steps,
    )


def imagenet(program, benchmark):
    return Row(program, benchmark, "photographs", ("data.num_classes=1000",))


def qwen2(benchmark, **options):
    return Row(
        "lora_ddp",
        benchmark,
        "conversations",
        ("model.init=random", "decode.num_prompts=0"),
        steps=50,
        **options,
    )


ROWS = {
    "resnet50_synthetic": Row("resnet_ddp", ()),
    "resnet50_imagefolder": imagenet("resnet_ddp", ()),
    "cifar10_resnet18_imagenet_stem": cifar10("resnet_ddp", (), 1000),  # steps of less than 1 ms
    "cifar10_resnet18_cifar_stem": cifar10("resnet_ddp", (), 300),
    "vit_b_16_imagefolder": imagenet("vit_ddp", ("channels_last=false",)),
    "cifar10_vit_s_4": cifar10("vit_ddp", ("channels_last=false", "model=vit_s_4"), 300),
    "gpt2_124m": Row(
        "gpt2_ddp",
        ("model=gpt2",),
        "text",
        ("model.vocab_size=50257", "sample.num_samples=0"),
        steps=150,
        tokenizer=("--tokenizer", "bpe", "--vocab-size", "16384"),
    ),
    "gpt2_shakespeare_char": Row(
        "gpt2_ddp",
        ("model=gpt2", "vocab_size=65", "param_dtype=fp32"),
        "text",
        ("sample.num_samples=0",),
        ("train.batch_size", 64),
        tokenizer=("--tokenizer", "chars"),
        repeats=False,
    ),
    "bert_base": Row(
        "bert_ddp",
        ("model=bert",),
        "text",
        ("model.vocab_size=30522",),
        tokenizer=("--tokenizer", "wordpiece", "--vocab-size", "30522"),
        remark="the trainer's head runs on masked positions alone, the benchmark's on all",
    ),
    "lora_qwen2_7b": qwen2(("model=qwen2-7b",)),
    "qwen2_0_5b_full": qwen2(("model=qwen2-0.5b",), shared=("train.grad_accum_steps", 16)),
}


def read_config(name):
    """{full name of a setting: its text}. Two spaces indent a level, and no value has a # or several
    lines."""
    names, values = [], {}
    with open(os.path.join(ROOT, "examples", "configs", f"{name}.yaml")) as f:
        for line in f:
            line = line.split("#")[0].rstrip()
            if line:
                key, _, value = line.strip().partition(":")
                names[(len(line) - len(line.lstrip())) // 2 :] = [key]
                values.update({".".join(names): value.strip()} if value else {})
    return values


def own_settings(row, gpus):
    """The trainer's settings beside its configuration. The learning-rate schedule is that of a long run,
    because the warm-up of some configurations is longer than this run."""
    own = dict(setting.split("=", 1) for setting in row.own)
    if row.shared:
        own[row.shared[0]] = str(row.shared[1] // gpus)
    return {
        **own,
        "train.max_steps": str(row.steps),
        "train.epochs": "0",
        "lr_schedule.total_steps": "1000000",
    }


def benchmark_settings(row, settings):
    """Settings of the same step. `settings` are all settings of the trainer. Its two runs together measure as
    many steps."""
    steps = int(settings["train.max_steps"])
    same = {other: settings[name] for name, other in row.equivalents().items() if name in settings}
    own = dict(setting.split("=", 1) for setting in row.benchmark)
    return {
        **same,
        "step": "graph",
        "steps": max(1, steps // 6),
        "rounds": 3,
        "warmup": max(1, min(15, steps // 10)),
        **own,
    }


def remark(row, settings, source):
    """The differences between the two steps."""
    lacks = [
        f"{name}={settings[name]}"
        for name in STEP_SETTINGS
        if name in settings and name not in row.equivalents()
    ]
    packed = settings.get("tokens.layout") == "pack" and source != "random"
    return "; ".join(
        filter(
            None,
            [
                row.remark,
                packed and "only the trainer's attention is limited to each document of a row",
                lacks and "the benchmark lacks " + ", ".join(lacks),
            ],
        )
    )


def batch(settings):
    """Samples of a micro-batch, and micro-batches of a step, on each GPU."""
    return int(settings["train.batch_size"]), int(settings.get("train.grad_accum_steps", 1))


def prepare(row, source, folder, gpus, settings):
    """Makes the row's data from the value of its option. Returns their path."""
    num_samples = math.prod(batch(settings)) * gpus * int(settings["train.max_steps"])
    if row.needs == "cifar10":
        return source
    if row.needs == "photographs":  # two epochs: the run includes an evaluation and a save
        return photographs.prepare(source, folder, -(-num_samples // 2))
    length = settings["tokens.max_seq_len"]
    num_tokens = num_samples * int(length)
    script = {
        "text": ["data/prepare_text.py", source, folder, *row.tokenizer],
        "conversations": ["data/prepare_chat.py", source, folder],
    }[row.needs]
    if source == "random":
        script = [
            "tools/random_tokens.py",
            folder,
            "--vocab-size",
            QWEN2_VOCABULARY,
            "--tokens",
            str(num_tokens),
            "--document-length",
            length,
        ]
    done = subprocess.run([sys.executable] + script, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{script[0]} ended with {done.returncode}: {done.stderr.strip()}")
    if row.repeats and source != "random":
        repeat(os.path.join(folder, "train.safetensors"), num_tokens)
    return folder


def repeat(path, num_tokens):
    """Repeats the documents of a token file until it holds at least `num_tokens`."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    metadata = header.pop("__metadata__")
    parts = {name: (about["dtype"], data[slice(*about["data_offsets"])]) for name, about in header.items()}
    offsets = array.array("q", parts["documents"][1])
    copies = max(1, -(-num_tokens // offsets[-1]))
    parts = {name: (dtype, part * copies) for name, (dtype, part) in parts.items()}
    ends = array.array("q", [0])
    for copy in range(copies):
        ends.extend(copy * offsets[-1] + end for end in offsets[1:])
    parts["documents"] = ends
    with open(path, "wb") as f:
        f.writelines(serialize(parts, metadata))


def of_run(folder, name, steps):
    """Means over a run's steps after the warm-up: the time of a step, with logging and saving, and its waits.
    Evaluations stop the run's clock, so they are counted separately. Their seconds are those after the first
    log line."""
    try:
        run = numbers.read_run(folder, name, min(WARMUP, steps // 3))
        path = os.path.join(folder, name)
        rows = numbers.read_csv(os.path.join(path, "steps.csv"), ["time"])
        epochs = numbers.read_csv(os.path.join(path, "epochs.csv"), ["test_loss", "time"])
        evals = os.path.join(path, "evals.csv")  # with train.eval_every_steps or train.eval_first
        by_steps = (
            [row for row in numbers.read_csv(evals, ["step"]) if row["step"] != "0"]
            if os.path.exists(evals)
            else []
        )
    except numbers.DataError as error:
        raise ValueError(str(error)) from None
    seconds = (
        float(epochs[-1]["time"])
        - float(rows[0]["time"])
        - sum(float(row["interval_seconds"]) for row in rows[1:])
    )
    return dict(
        ms=round(run.step_ms, 4),
        exposed_comm_ms=run.exposed_comm_ms,
        loader_wait_ms=run.loader_wait_ms,
        evaluations=len(by_steps) or sum(epoch["test_loss"] != "" for epoch in epochs),
        evaluation_seconds=round(max(0, seconds), 2),
    )


def ratio(before_ms, trainer_ms, after_ms):
    """The trainer's rate / the benchmark's, whose time is the mean of its two runs."""
    return (before_ms + after_ms) / 2 / trainer_ms
