# SPDX-License-Identifier: Apache-2.0
"""Two archives of torch.export.save as one, which holds the weights once."""

import json
import zipfile

ALIGNMENT = 64  # of the data of an entry, as torch.save has it: such data can be mapped
PIECE = 1 << 24
EVAL = "eval"
FOLDERS = {"data/weights/": ("weights", "weight_"), "data/constants/": ("constants", "tensor_")}


def root_of(archive):
    return archive.namelist()[0].split("/")[0] + "/"


def append(archive, name, data):
    """Adds an entry that is stored and aligned. The padding is an extra field of the header."""
    entry = zipfile.ZipInfo(name)
    begin = archive.start_dir + 30 + len(name.encode()) + 4
    padding = -begin % ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    archive.writestr(entry, data)


def same_bytes(one, name, other, other_name):
    first, second = one.getinfo(name), other.getinfo(other_name)
    if (first.file_size, first.CRC) != (second.file_size, second.CRC):
        return False
    with one.open(first) as a, other.open(second) as b:
        while piece := a.read(PIECE):
            if piece != b.read(PIECE):
                return False
    return True


def merge_tensors(target, source, folder):
    """Adds the table of the tensors of `source`. Equal tensors of the same name keep the entry that `target`
    has."""
    kind, prefix = FOLDERS[folder]
    into, out_of = root_of(target) + folder, root_of(source) + folder
    known = json.loads(target.read(f"{into}model_{kind}_config.json"))["config"]
    table = json.loads(source.read(f"{out_of}model_{kind}_config.json"))
    count = sum(name.startswith(into + prefix) for name in target.namelist())
    moved = {}
    for name, payload in table["config"].items():
        path = payload["path_name"]
        if path not in moved:
            same = known.get(name, {}).get("path_name")
            if same is None or not same_bytes(target, into + same, source, out_of + path):
                same, count = f"{prefix}{count}", count + 1
                append(target, into + same, source.read(out_of + path))
            moved[path] = same
        payload["path_name"] = moved[path]
    append(target, f"{into}{EVAL}_{kind}_config.json", json.dumps(table))


def merge(training, evaluation):
    """Adds the program of the archive `evaluation` to the archive `training`, under the name eval."""
    with zipfile.ZipFile(evaluation) as source, zipfile.ZipFile(training, "a", zipfile.ZIP_STORED) as target:
        for folder in FOLDERS:
            merge_tensors(target, source, folder)
        for name, ending in (("models", "json"), ("data/sample_inputs", "pt")):
            append(
                target,
                f"{root_of(target)}{name}/{EVAL}.{ending}",
                source.read(f"{root_of(source)}{name}/model.{ending}"),
            )
