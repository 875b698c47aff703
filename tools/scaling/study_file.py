# SPDX-License-Identifier: Apache-2.0
"""Reads a study's YAML file. Every mistake is a StudyError that names file, line, key and fix."""

import difflib
import re

from .command_line import StudyError
from .files import linked

try:
    import yaml
except ImportError:  # said where a file is to be read
    yaml = None

# Trainers in the build folder's examples/. They have every setting that a study can set.
PROGRAMS = ("resnet_ddp", "vit_ddp", "cnn_ddp", "bert_ddp", "gpt2_ddp", "lora_ddp", "exported_ddp")
SETTING_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
KINDS = ("strong", "weak", "sensitivity")
MAX_RANKS = 65536

# What a study sets itself, and through which of its keys.
RESERVED = {
    "train.max_steps": "steps",
    "train.epochs": "steps",
    "metrics.log_every": "log_every",
    "metrics.repeat": "repeats",
    "metrics.dir": "--output",
    "metrics.run_name": "--output",
    "checkpoint.dir": "nothing: a measured run saves no checkpoints",
    "context.device": "gpus or cpu_ranks",
}


class _Value:
    """A YAML node with the place it came from."""

    def __init__(self, path, key, node):
        self.path, self.key, self.node = path, key, node

    def fail(self, message):
        raise StudyError(f"{self.path}:{self.node.start_mark.line + 1}: {self.key}: {message}")

    def text(self):
        if not isinstance(self.node, yaml.ScalarNode) or self.node.value == "":
            self.fail("give one value")
        return self.node.value

    def one_of(self, choices, other=""):
        value = self.text()
        if value not in choices:
            near = difflib.get_close_matches(value, choices, 1)
            self.fail(
                f"unknown value {value!r}{f', did you mean {near[0]}?' if near else ''}; one of "
                f"{', '.join(choices)}{other}"
            )
        return value

    def whole(self, least, most=10**9):
        value = self.text()
        if not re.fullmatch(r"[+-]?\d+", value) or not least <= int(value) <= most:
            self.fail(f"{value!r} is not a whole number from {least} to {most}")
        return int(value)

    def items(self):
        if not isinstance(self.node, yaml.SequenceNode):
            return [self]
        if not self.node.value:
            self.fail("the list is empty: give at least one value")
        return [_Value(self.path, self.key, node) for node in self.node.value]

    def mapping(self):
        """{key: _Value}; a key twice is a mistake that YAML itself would swallow."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail("give keys and values below it")
        values = {}
        for key_node, node in self.node.value:
            key = _Value(self.path, str(key_node.value), key_node)
            if key.key in values:
                key.fail("given twice")
            values[key.key] = _Value(self.path, key.key, node)
            values[key.key].key_node = key
        return values


def _root(path):
    if yaml is None:
        raise StudyError("reading a study needs PyYAML: pip install pyyaml")
    try:
        with open(path, encoding="utf-8", opener=linked) as file:
            node = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StudyError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise StudyError(
            f"{path}:{mark.line + 1 if mark else 1}: not YAML: {getattr(error, 'problem', error)}"
        ) from None
    if node is None:
        raise StudyError(f"{path}:1: the file is empty; slurm/studies/ has examples")
    return _Value(path, "study", node).mapping()


def _setting_name(value):
    if not SETTING_NAME.fullmatch(value.key):
        value.key_node.fail("not a setting: its name is section.name, as docs/configuration.md lists them")
    if value.key in RESERVED:
        value.key_node.fail(f"a study sets this itself; fix: use {RESERVED[value.key]}")
    return value.key


def _one_setting(value):
    """A setting of the program that the study sets itself."""
    name = value.text()
    if not SETTING_NAME.fullmatch(name):
        value.fail(f"{name!r} is not a setting: give its full name, section.name")
    return name


def _program(value):
    """One of PROGRAMS, or a path, which has a slash."""
    if "/" in value.text():
        return value.text()
    return value.one_of(PROGRAMS, " or a path with a slash")


def _setting_values(value):
    texts = []
    for item in value.items():
        text = item.text()
        if re.search(r"[,\s]", text):
            item.fail(f"{text!r} holds a comma or blank: a varied value cannot")
        if text in texts:
            item.fail(f"{text} is given twice")
        texts.append(text)
    return texts


# What each key is read with. The order is that of docs and examples.
_READERS = {
    "title": lambda v: v.text(),
    "kind": lambda v: v.one_of(KINDS),
    "program": _program,
    "config": lambda v: v.text(),
    "gpus": lambda v: _ranks(v, "GPUs"),
    "cpu_ranks": lambda v: _ranks(v, "ranks"),
    "per_node": lambda v: v.whole(1, 1024),
    "global_batch_size": lambda v: v.whole(1),
    "batch_size_per_gpu": lambda v: v.whole(1),
    "micro_batch_size": lambda v: v.whole(1),
    "batch_size_setting": _one_setting,
    "global_batch_size_setting": _one_setting,
    "steps_setting": _one_setting,
    "vary": lambda v: {_setting_name(x): _setting_values(x) for x in v.mapping().values()},
    "repeats": lambda v: v.whole(1, 1000),
    "steps": lambda v: v.whole(2),
    "warmup_steps": lambda v: v.whole(1),
    "log_every": lambda v: v.whole(1),
    "cpus_per_rank": lambda v: v.whole(1, 1024),
    "time": lambda v: _time(v),
    "settings": lambda v: {_setting_name(x): _setting_text(x) for x in v.mapping().values()},
    "prepare": lambda v: {x.key: x.text() for x in v.mapping().values()},
    "sbatch": lambda v: [_sbatch_option(x) for x in v.items()],
}


def _ranks(value, what):
    numbers = []
    for item in value.items():
        text = item.text()
        if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= MAX_RANKS:
            item.fail(f"{text!r} is not a number of {what}: give whole numbers from 1 to {MAX_RANKS}")
        if int(text) in numbers:
            item.fail(f"{text} is given twice")
        numbers.append(int(text))
    return sorted(numbers)


def _time(value):
    text = value.text()
    match = re.fullmatch(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})", text)
    # YAML 1.1 would read 1:30:00 as a number in base 60; the node still holds the text.
    if not match or not any(int(x or 0) for x in match.groups()):
        value.fail(f"{text!r} is not a time limit: give [days-]hours:minutes:seconds")
    return text


def _setting_text(value):
    if isinstance(value.node, yaml.SequenceNode):
        return ",".join(item.text() for item in value.items())
    if isinstance(value.node, yaml.ScalarNode):
        return value.node.value
    return value.text()


def _sbatch_option(value):
    text = value.text()
    if not text.startswith("--"):
        value.fail(f"{text!r} is not an option of sbatch: give --name=value")
    name = re.split(r"[=\s]", text)[0]
    if name in (
        "--array",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--time",
        "--parsable",
        "--job-name",
        "--chdir",
        "--dependency",
        "--output",
    ):
        value.fail(f"tools/study.py sets {name}; fix: leave it out")
    if re.match(r"--[^=]*\s", text):
        value.fail(f"{text!r} holds a blank: give --name=value")
    return text


def setting_names(path):
    """The full names of the settings in a program's configuration."""
    names = []

    def visit(node, prefix):
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                visit(child, [*prefix, str(key.value)])
        else:
            names.append(".".join(prefix))

    for key, value in _root(path).items():
        visit(value.node, [key])
    return names


def read(path):
    """The file's keys as plain values, and where each stands: ({key: value}, fail(key, message))."""
    root = _root(path)
    values = {}
    for key, value in root.items():
        if key not in _READERS:
            near = difflib.get_close_matches(key, _READERS, 1)
            value.key_node.fail(
                f"no such key{f', did you mean {near[0]}?' if near else ''}; there are {', '.join(_READERS)}"
            )
        values[key] = _READERS[key](value)

    def fail(key, message):
        if key in root:
            root[key].fail(message)
        raise StudyError(f"{path}: {key}: {message}")

    return values, fail
