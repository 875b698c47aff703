# SPDX-License-Identifier: Apache-2.0
"""For the tests of the prepare scripts: token files read without any package, and running a script."""

import array
import json
import os
import resource
import struct
import subprocess
import sys


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        code = {"U8": "B", "U16": "H", "I32": "i", "I64": "q"}[entry["dtype"]]
        assert begin % array.array(code).itemsize == 0, (path, name, "is not aligned")
        tensors[name] = array.array(code, data[begin:end])
        assert [len(tensors[name])] == entry["shape"], (path, name)
    return tensors, metadata


class Folder:
    """What a prepare script wrote."""

    def __init__(self, path):
        self.splits = {
            split: read_safetensors(os.path.join(path, split + ".safetensors")) for split in ("train", "eval")
        }
        vocabulary, self.metadata = read_safetensors(os.path.join(path, "vocabulary.safetensors"))
        offsets, data = vocabulary["offsets"], vocabulary["bytes"].tobytes()
        self.words = [data[b:e] for b, e in zip(offsets, offsets[1:])]
        self.special = vocabulary["special"]
        for _, metadata in self.splits.values():
            for key in "tokenizer", "vocab_size", "format_version", "tokenizer_name":
                assert metadata[key] == self.metadata[key], key
            assert metadata["format"] == "ddp_tokens"
        assert self.metadata["format"] == "ddp_vocabulary"
        assert len(self.words) == len(self.special) == int(self.metadata["vocab_size"])

    def ids(self, split, document):
        tensors = self.splits[split][0]
        begin, end = tensors["documents"][document : document + 2]
        return list(tensors["tokens"][begin:end])

    def text(self, split, document):
        return b"".join(self.words[i] for i in self.ids(split, document)).decode()

    def answers(self, split, document):
        """The text of each span of targets."""
        tensors = self.splits[split][0]
        begin, end = tensors["documents"][document : document + 2]
        spans, before = [], 0
        for i, target in zip(tensors["tokens"][begin:end], tensors["targets"][begin:end]):
            if target and not before:
                spans.append(b"")
            if target:
                spans[-1] += self.words[i]
            before = target
        return [span.decode() for span in spans]

    def size(self, split):
        return len(self.splits[split][0]["documents"]) - 1


def run_script(script, *arguments, largest_file=None):
    """`largest_file`: bytes after which writing fails."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit if largest_file else None,
    )


def refused(script, code, parts, *arguments, largest_file=None):
    """The script ends with `code`, says all of `parts`, and shows no traceback."""
    result = run_script(script, *arguments, largest_file=largest_file)
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    for part in parts:
        assert part in result.stderr, (part, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr


def read_bytes(folder):
    """name -> bytes of all files; a file of a run that failed must not stay."""
    files = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    assert not any(name.endswith(".part") for name in files), files.keys()
    return files
