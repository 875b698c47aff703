# SPDX-License-Identifier: Apache-2.0
"""A study as the list of its runs, each with its name, its ranks and its settings."""

import itertools
import math
import os
import re
from dataclasses import dataclass, field

from . import study_file
from .study_file import MAX_RANKS, StudyError

SBATCH_FILES = {
    "strong": "slurm/strong_scaling.sbatch",
    "weak": "slurm/weak_scaling.sbatch",
    "sensitivity": "slurm/sensitivity.sbatch",
}

LR_WARMUP = "lr_schedule.warmup_steps"

# Settings that only switch something off. A program that lacks them has nothing to switch off.
SWITCHED_OFF = {
    "train.eval_first": "false",
    "train.eval_every": "0",
    "train.eval_every_steps": "0",
    LR_WARMUP: "0",
    "train.epochs": "0",
    "loader.global_batch_size": "0",
    "train.grad_accum_steps": "1",
    "checkpoint.dir": "",
}


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
    work_dir: str  # where a program given by its path runs; empty for libddp's trainers
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

    def fit(self, known, configured):
        """Leaves out what switches off something that the program lacks, or has switched off by default.
        `known`: the program's settings with their defaults; `configured`: those in its configuration."""

        def is_needed(word):
            name, _, value = word.partition("=")
            if SWITCHED_OFF.get(name) != value or name in configured:
                return True
            return name in known and known[name] != value

        self.settings = list(filter(is_needed, self.settings))
        for group in self.groups:
            group.settings = list(filter(is_needed, group.settings))

    def arguments(self, group):
        """What the program is started with, but for what varies and what names the run."""
        return (["--config", self.config] if self.config else []) + self.settings + group.settings


def placement(ranks, per_node):
    """(nodes, ranks a node): the fewest nodes of at most per_node that all get equally many."""
    nodes = math.ceil(ranks / per_node)
    while ranks % nodes:
        nodes += 1
    return nodes, ranks // nodes


def _strong_settings(values, batch, ranks, fail):
    """The global batch as one shared batch, or as the fewest equal micro-batches of at most
    micro_batch_size samples a rank."""
    micro = values.get("micro_batch_size", batch)
    each = values.get("batch_size_setting")  # a rank's share, which then is equal on all ranks
    if batch < ranks:
        fail(
            "global_batch_size",
            f"{batch} samples are fewer than the {ranks} ranks that share them; "
            f"fix: at least {ranks}, or fewer ranks",
        )
    for parts in range(1, batch // ranks + 1):
        shared = batch // parts
        if batch % parts == 0 and math.ceil(shared / ranks) <= micro and not (each and shared % ranks):
            name = values.get("global_batch_size_setting", "loader.global_batch_size")
            word = f"{each}={shared // ranks}" if each else f"{name}={shared}"
            return [word, f"train.grad_accum_steps={parts}"]
        if parts == 1 and "micro_batch_size" not in values:
            fail(
                "batch_size_setting",
                f"{each} is the batch of one rank, and {batch} samples are no equal shares of {ranks} ranks; "
                "fix: another global_batch_size, or global_batch_size_setting",
            )
    fail(
        "micro_batch_size",
        f"{batch} samples cannot be cut into equal micro-batches of at least one and at most "
        f"{micro} sample(s) on each of {ranks} ranks; fix: a larger micro_batch_size",
    )


def _weak_settings(values, batch, ranks):
    if "batch_size_setting" in values:
        own = [f"{values['batch_size_setting']}={batch}"]
    elif "global_batch_size_setting" in values:
        own = [f"{values['global_batch_size_setting']}={batch * ranks}"]
    else:
        own = [f"train.batch_size={batch}", "loader.global_batch_size=0"]
    return [*own, "train.grad_accum_steps=1"]


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
    _check_own_settings(values, fail)
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


def _check_own_settings(values, fail):
    """The program's names for its batch and its length."""
    own = {
        key: values[key]
        for key in ("batch_size_setting", "global_batch_size_setting", "steps_setting")
        if key in values
    }
    if values["kind"] == "sensitivity":
        for key in own.keys() - {"steps_setting"}:
            fail(key, "a key of strong and weak studies, but this study's kind is sensitivity")
    if {"batch_size_setting", "global_batch_size_setting"} <= own.keys():
        fail(
            "batch_size_setting",
            "give either batch_size_setting (of one rank) or global_batch_size_setting (of all ranks)",
        )
    for owner in ("settings", "vary"):
        for key, name in own.items():
            if name in values.get(owner, {}):
                fail(owner, f"the study sets {name}, which {key} names; fix: leave it out of {owner}")


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


def _own_settings(values):
    """The settings of the study's file, after what it leaves switched off."""
    own = values.get("settings", {})
    # A configuration's warm-up is made for a whole training and would be longer than a run, which is refused.
    settings = [
        f"{name}={SWITCHED_OFF[name]}"
        for name in ("train.eval_first", "train.eval_every", "train.eval_every_steps", LR_WARMUP)
        if name not in {**values.get("vary", {}), **own}
    ]
    return settings + [f"{key}={value}" for key, value in own.items()]


def load(path, root=".", caller=".", max_ranks=MAX_RANKS):
    """Reads and checks a study. `root` is the repository's top, where configurations lie, and `caller` the
    folder of the call, where a program given by its path runs. Points of more than `max_ranks` stay out."""
    values, fail = study_file.read(path)
    _check(values, fail)
    _check_schedule(values, fail)
    kind = values["kind"]
    config = values.get("config", "")
    work_dir = os.path.abspath(caller) if "/" in values["program"] else ""
    if config and not os.path.isfile(os.path.join(work_dir or root, config)):
        fail("config", f"there is no file {config} (seen from {work_dir or 'the top of the repository'})")
    if not work_dir and not config and "settings" not in values:
        fail("config", "missing; fix: name a configuration (examples/configs/), or give settings")
    all_ranks = values.get("gpus") or values["cpu_ranks"]
    if min(all_ranks) > max_ranks:
        raise StudyError(f"--max-ranks {max_ranks}: the smallest point of {path} has {min(all_ranks)} ranks")
    steps, warmup = values["steps"], values.get("warmup_steps", 1)
    batch = (
        values.get("global_batch_size", 512) if kind == "strong" else values.get("batch_size_per_gpu", 128)
    )
    device = "cuda" if "gpus" in values else "cpu"
    log_every = values.get("log_every", max(1, (steps - warmup) // 5))
    name = os.path.splitext(os.path.basename(path))[0]
    settings = _own_settings(values) + [
        f"context.device={device}",
        f"{values.get('steps_setting', 'train.max_steps')}={steps}",
        "train.epochs=0",
        f"metrics.log_every={log_every}",
    ]
    if work_dir:  # libddp's trainers get it from the job file, or from local_command()
        settings.append("checkpoint.dir=")
    study = Study(
        path=path,
        name=name,
        title=values.get("title", name),
        kind=kind,
        program=values["program"],
        config=config,
        work_dir=work_dir,
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
    _add_groups(study, values, [ranks for ranks in all_ranks if ranks <= max_ranks], batch, fail)
    return study


def _add_groups(study, values, all_ranks, batch, fail):
    for ranks in all_ranks:
        _check_shares(values, ranks, fail)
        nodes, per_node = placement(ranks, values.get("per_node", 8))
        own = []
        if study.kind == "strong":
            own = _strong_settings(values, batch, ranks, fail)
        elif study.kind == "weak":
            own = _weak_settings(values, batch, ranks)
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
