# SPDX-License-Identifier: Apache-2.0
"""A study as the list of its runs, each with its name, its ranks and its settings."""

import itertools
import math
import os
import re
from dataclasses import dataclass, field

from . import study_file
from .study_file import StudyError

SBATCH_FILES = {
    "strong": "slurm/strong_scaling.sbatch",
    "weak": "slurm/weak_scaling.sbatch",
    "sensitivity": "slurm/sensitivity.sbatch",
}

LR_WARMUP = "lr_schedule.warmup_steps"


@dataclass
class Run:
    name: str  # of its folder
    ranks: int
    repeat: int
    task: int  # of the group's Slurm array
    varied: dict  # setting -> value; empty but in sensitivity studies
    settings: list  # key=value, beside the study's own


@dataclass
class Group:
    """The runs of one number of ranks: one Slurm array."""

    ranks: int
    nodes: int
    per_node: int
    settings: list
    runs: list = field(default_factory=list)


@dataclass
class Study:
    path: str
    name: str
    title: str
    kind: str
    program: str
    config: str
    device: str  # "cuda" or "cpu"
    batch: int  # of all ranks (strong), of a rank (weak), 0 (sensitivity)
    repeats: int
    steps: int
    warmup_steps: int
    log_every: int
    vary: dict
    time: str
    cpus_per_rank: int
    sbatch: list
    settings: list  # of every run
    groups: list
    prepare: dict  # path -> the command that makes it, where it is missing

    @property
    def runs(self):
        """In the order of a single host: one repeat of every point, then the next, so that a drift of
        the machine meets all points alike."""
        return sorted((run for group in self.groups for run in group.runs), key=lambda run: run.repeat)

    def arguments(self, group):
        """What the program is started with, but for what varies and what names the run."""
        return (["--config", self.config] if self.config else []) + self.settings + group.settings


def placement(ranks, per_node):
    """(nodes, ranks a node): the fewest nodes of at most per_node that all get equally many."""
    nodes = math.ceil(ranks / per_node)
    while ranks % nodes:
        nodes += 1
    return nodes, ranks // nodes


def _strong_settings(batch, ranks, micro, fail):
    """The global batch as one shared batch, or as the fewest equal micro-batches of at most `micro` a
    rank."""
    if batch < ranks:
        fail(
            "global_batch_size",
            f"{batch} samples are fewer than the {ranks} ranks that share them; "
            f"fix: at least {ranks}, or fewer ranks",
        )
    if micro is None:
        return [f"loader.global_batch_size={batch}", "train.grad_accum_steps=1"]
    for parts in range(1, batch + 1):
        if batch % parts == 0 and math.ceil(batch / parts / ranks) <= micro:
            if batch // parts < ranks:
                break
            return [f"loader.global_batch_size={batch // parts}", f"train.grad_accum_steps={parts}"]
    fail(
        "micro_batch_size",
        f"{batch} samples cannot be cut into equal micro-batches of at least one and at most "
        f"{micro} sample(s) on each of {ranks} ranks; fix: a larger micro_batch_size",
    )


def _require(values, fail, key):
    if key not in values:
        fail(key, "missing; fix: add it (slurm/studies/ has examples)")


def _check(values, fail):
    _require(values, fail, "kind")
    _require(values, fail, "program")
    _require(values, fail, "steps")
    kind = values["kind"]
    if ("gpus" in values) == ("cpu_ranks" in values):
        fail("gpus", "give either gpus (one rank per GPU) or cpu_ranks")
    allowed = {
        "strong": {"global_batch_size", "micro_batch_size"},
        "weak": {"batch_size_per_gpu"},
        "sensitivity": {"vary"},
    }
    for owner, keys in allowed.items():
        for key in keys - allowed[kind]:
            if key in values:
                fail(key, f"a key of {owner} studies, but this study's kind is {kind}")
    if kind == "sensitivity":
        _require(values, fail, "vary")
    tied = {
        "strong": {
            "loader.global_batch_size": "global_batch_size",
            "train.grad_accum_steps": "micro_batch_size",
        },
        "weak": {
            "train.batch_size": "batch_size_per_gpu",
            "loader.batch_size": "batch_size_per_gpu",
            "loader.global_batch_size": "batch_size_per_gpu",
            "train.grad_accum_steps": "batch_size_per_gpu",
        },
    }.get(kind, {})
    for key in values.get("settings", {}):
        if key in tied:
            fail("settings", f"{tied[key]} sets {key} in a {kind} study; fix: use {tied[key]}")
        if key in values.get("vary", {}):
            fail("settings", f"{key} is varied too; fix: leave it out of settings")
    warmup = values.get("warmup_steps", 1)
    if warmup >= values["steps"]:
        fail(
            "warmup_steps",
            f"{warmup} of {values['steps']} steps leave nothing to measure; fix: fewer, or more steps",
        )
    if values.get("log_every", 1) > values["steps"] - warmup:
        fail(
            "log_every",
            f"{values['log_every']}: no interval of that many steps fits after the warm-up; fix: at most "
            f"{values['steps'] - warmup}",
        )


def _check_schedule(values, fail):
    """The learning rate's warm-up, where the study sets it, must end before the run."""
    for owner, texts in (
        ("settings", [values.get("settings", {}).get(LR_WARMUP, "0")]),
        ("vary", values.get("vary", {}).get(LR_WARMUP, [])),
    ):
        for text in texts:
            if text.isdigit() and int(text) >= values["steps"]:
                fail(
                    owner,
                    f"{LR_WARMUP}={text} does not end within the {values['steps']} steps of a run; fix: "
                    "fewer, or more steps",
                )


def _check_shares(values, ranks, fail):
    """A batch of all ranks that is varied or set must have a sample for each rank."""
    shared = values.get("vary", {}).get("loader.global_batch_size", [])
    if "loader.global_batch_size" in values.get("settings", {}):
        shared = shared + [values["settings"]["loader.global_batch_size"]]
    for text in shared:
        if not text.isdigit() or 0 < int(text) < ranks:
            fail(
                "vary" if "vary" in values else "settings",
                f"loader.global_batch_size={text} is not a batch that {ranks} ranks can share; fix: at least "
                f"{ranks}",
            )


def run_name(ranks, varied, repeat):
    """The folder of a run; the sbatch files name theirs the same way."""
    name = f"n{ranks:03d}" + "".join(f"_{key}-{value}" for key, value in varied.items())
    return re.sub(r"[^A-Za-z0-9._-]", "-", name) + f"_r{repeat}"


def load(path, root="."):
    """Reads and checks a study; `root` is the repository's top, where configurations lie."""
    values, fail = study_file.read(path)
    _check(values, fail)
    _check_schedule(values, fail)
    kind = values["kind"]
    config = values.get("config", "")
    if config and not os.path.isfile(os.path.join(root, config)):
        fail("config", f"there is no file {config} (seen from the top of the repository)")
    if not config and "settings" not in values:
        fail("config", "missing; fix: name a configuration (examples/configs/), or give settings")
    all_ranks = values.get("gpus") or values["cpu_ranks"]
    steps, warmup = values["steps"], values.get("warmup_steps", 1)
    batch = (
        values.get("global_batch_size", 512) if kind == "strong" else values.get("batch_size_per_gpu", 128)
    )
    device = "cuda" if "gpus" in values else "cpu"
    log_every = values.get("log_every", max(1, (steps - warmup) // 5))
    name = os.path.splitext(os.path.basename(path))[0]
    # A configuration's warm-up is made for a whole training and would be longer than a run, which is refused.
    first = ["train.eval_first=false", "train.eval_every=0", "train.eval_every_steps=0", f"{LR_WARMUP}=0"]
    settings = [
        word
        for word in first
        if word.split("=")[0] not in {**values.get("vary", {}), **values.get("settings", {})}
    ]
    settings += [f"{key}={value}" for key, value in values.get("settings", {}).items()]
    settings += [
        f"context.device={device}",
        f"train.max_steps={steps}",
        "train.epochs=0",
        f"metrics.log_every={log_every}",
    ]
    study = Study(
        path=path,
        name=name,
        title=values.get("title", name),
        kind=kind,
        program=values["program"],
        config=config,
        device=device,
        batch=0 if kind == "sensitivity" else batch,
        repeats=values.get("repeats", 3),
        steps=steps,
        warmup_steps=warmup,
        log_every=log_every,
        vary=values.get("vary", {}),
        time=values.get("time", "00:30:00"),
        cpus_per_rank=values.get("cpus_per_rank", 1 if device == "cpu" else 8),
        sbatch=values.get("sbatch", []),
        settings=settings,
        groups=[],
        prepare=values.get("prepare", {}),
    )
    _add_groups(study, values, all_ranks, batch, fail)
    return study


def _add_groups(study, values, all_ranks, batch, fail):
    for ranks in all_ranks:
        _check_shares(values, ranks, fail)
        nodes, per_node = placement(ranks, values.get("per_node", 8))
        own = []
        if study.kind == "strong":
            own = _strong_settings(batch, ranks, values.get("micro_batch_size"), fail)
        elif study.kind == "weak":
            own = [f"train.batch_size={batch}", "loader.global_batch_size=0", "train.grad_accum_steps=1"]
        study.groups.append(Group(ranks, nodes, per_node, own))
        _add_runs(study, study.groups[-1])


def _add_runs(study, group):
    for values in itertools.product(*study.vary.values()):
        varied = dict(zip(study.vary, values))
        for repeat in range(1, study.repeats + 1):
            group.runs.append(
                Run(
                    name=run_name(group.ranks, varied, repeat),
                    ranks=group.ranks,
                    repeat=repeat,
                    task=len(group.runs) + 1,
                    varied=varied,
                    settings=[f"{key}={value}" for key, value in varied.items()],
                )
            )


__all__ = ["Group", "Run", "SBATCH_FILES", "Study", "StudyError", "load", "placement", "run_name"]
