# SPDX-License-Identifier: Apache-2.0
"""Token files and vocabularies as libddp reads them (data/README.md). Standard library only.

The prepare scripts for text build on this module: it checks input text, collects documents as ids and
writes a folder of train.safetensors, eval.safetensors and vocabulary.safetensors.
"""

import array
import codecs
import hashlib
import json
import os
import struct
import sys

from prepare_script import PrepareError, regular, write_files

ITEM_BYTES = {"I64": 8, "I32": 4, "U16": 2, "U8": 1}
TYPE_CODES = {"I64": "q", "I32": "i", "U16": "H"}


def decode_utf8(data, where, first_line=1):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        start = data.rfind(b"\n", 0, error.start) + 1
        raise PrepareError(
            f"invalid UTF-8: byte 0x{data[error.start]:02x} at byte {error.start - start} of the line",
            where,
            line,
        ) from None


def open_text(path):
    """The file's bytes behind UTF-8's byte order mark, which Windows programs write. The mark is no text."""
    file = open(path, "rb")
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


def parse_json(text, path, line=None):
    """`line` is what the text is; without, it is a whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if line is None:
            raise PrepareError(f"not JSON: {error.msg}", path, error.lineno) from None
        raise PrepareError(f"not JSON: {error.msg} at character {error.pos}", path, line) from None
    except RecursionError:
        raise PrepareError("not readable JSON: nested too deeply", path, line) from None
    except ValueError as error:  # a number of thousands of digits
        raise PrepareError(f"not readable JSON: {error}", path, line) from None


def read_json_lines(path, skipped=None):
    """(line number, value) of a JSON Lines file, or of a file that is one JSON list (its items are
    counted instead of lines). Blank lines are passed over. `skipped`, where given, is called
    with the error of each line that cannot be read, and raises it or lets the reading go on; an error
    in a list is one of the whole file, and raised."""
    with open_text(path) as file:
        begin = file.tell()
        start = file.read(64).lstrip()
        file.seek(begin)
        if start[:1] == b"[":
            yield from enumerate(parse_json(decode_utf8(file.read(), path), path), 1)
            return
        for number, line in enumerate(file, 1):
            try:
                text = decode_utf8(line, path, number).strip()
                value = parse_json(text, path, number) if text else None
            except PrepareError as error:
                if not skipped:
                    raise
                skipped(error)
                continue
            if text:
                yield number, value


def check_unicode(text, where, line):
    """JSON's escapes can write halves of surrogate pairs, which no UTF-8 has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PrepareError(
            f"invalid Unicode: \\u{ord(text[error.start]):04x} is half a character", where, line
        ) from None
    return text


class Vocabulary:
    """What ids stand for: `entries[id]` is (bytes, is_special)."""

    def __init__(self, name, entries, end_of_text=None, end_of_turn=None):
        self.name, self.entries = name, entries
        self.end_of_text, self.end_of_turn = end_of_text, end_of_turn

    def identity(self):
        digest = hashlib.sha256()
        for text, special in self.entries:
            digest.update(struct.pack("<I", len(text)) + text + bytes([special]))
        return "sha256:" + digest.hexdigest()

    def metadata(self):
        result = {
            "format_version": "1",
            "vocab_size": str(len(self.entries)),
            "tokenizer": self.identity(),
            "tokenizer_name": self.name,
        }
        for key in "end_of_text", "end_of_turn":
            if getattr(self, key) is not None:
                result[key] = str(getattr(self, key))
        return result

    def tensors(self):
        offsets = array.array("q", [0])
        for text, _ in self.entries:
            offsets.append(offsets[-1] + len(text))
        return {
            "bytes": ("U8", b"".join(text for text, _ in self.entries)),
            "offsets": offsets,
            "special": ("U8", bytes(special for _, special in self.entries)),
        }


def read_vocabulary(folder):
    """The Vocabulary in a folder that write_folder() made. Its identity is computed, not read."""
    path = os.path.join(folder, "vocabulary.safetensors")
    with open(path, "rb", opener=regular) as file:
        data = file.read()
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])

        def part(name):
            begin, end = header[name]["data_offsets"]
            return data[8 + length + begin : 8 + length + end]

        words, special = part("bytes"), part("special")
        offsets = struct.unpack(f"<{len(special) + 1}q", part("offsets"))
        metadata = header["__metadata__"]
        ends = {key: int(metadata[key]) for key in ("end_of_text", "end_of_turn") if key in metadata}
        entries = [(words[b:e], bool(s)) for b, e, s in zip(offsets, offsets[1:], special)]
        return Vocabulary(metadata["tokenizer_name"], entries, **ends)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"not a vocabulary of libddp: {error!r}", path) from None


class Documents:
    """One split, document by document."""

    def __init__(self, vocab_size, with_targets=False):
        self.tokens = array.array("H" if vocab_size <= 1 << 16 else "i")
        self.offsets = array.array("q", [0])
        self.targets = bytearray() if with_targets else None
        self.longest = 0

    def add(self, ids, targets=None, end=None):
        """`end` is one more id. Nothing becomes of a document without ids: files hold none."""
        if len(ids) == 0:
            return
        self.tokens.extend(ids)
        if end is not None:
            self.tokens.append(end)
        if self.targets is not None:
            self.targets.extend(targets)
        self.offsets.append(len(self.tokens))
        self.longest = max(self.longest, self.offsets[-1] - self.offsets[-2])

    def __len__(self):
        return len(self.offsets) - 1

    def tensors(self):
        result = {"tokens": self.tokens, "documents": self.offsets}
        if self.targets is not None:
            result["targets"] = ("U8", bytes(self.targets))
        return result

    def summary(self):
        text = f"{len(self)} documents, {len(self.tokens)} tokens, the longest {self.longest}"
        if self.targets is not None:
            text += f", {sum(self.targets)} targets"
        return text


def serialize(tensors, metadata):
    """A safetensors file of one-dimensional tensors, the widest elements first, so that all are
    aligned."""
    parts = []
    for name, value in tensors.items():
        if isinstance(value, array.array):
            dtype = next(d for d, code in TYPE_CODES.items() if code == value.typecode)
            if sys.byteorder == "big":
                value = array.array(value.typecode, value)
                value.byteswap()
            value = (dtype, memoryview(value).cast("B"))
        parts.append((name, *value))
    parts.sort(key=lambda part: (-ITEM_BYTES[part[1]], part[0]))
    header, offset = {"__metadata__": metadata}, 0
    for name, dtype, data in parts:
        header[name] = {
            "dtype": dtype,
            "shape": [len(data) // ITEM_BYTES[dtype]],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *(data for _, _, data in parts)]


def write_folder(folder, vocabulary, splits, name, more_files=None):
    """`splits`: {"train": Documents, "eval": Documents}. `more_files`: name -> bytes."""
    for split, documents in splits.items():
        if len(documents) == 0:
            raise PrepareError(
                f"the {'evaluation' if split == 'eval' else 'training'} set is empty: nothing was written"
            )
    metadata = vocabulary.metadata()
    files = {name: [data] for name, data in (more_files or {}).items()}
    files["vocabulary.safetensors"] = serialize(vocabulary.tensors(), metadata | {"format": "ddp_vocabulary"})
    for split, documents in splits.items():
        files[split + ".safetensors"] = serialize(
            documents.tensors(), metadata | {"format": "ddp_tokens", "name": f"{name} ({split})"}
        )
    write_files(folder, files)
    for split, documents in splits.items():
        print(f"{os.path.join(folder, split)}.safetensors: {documents.summary()}")
    print(f"vocabulary: {vocabulary.name}, {len(vocabulary.entries)} ids, {vocabulary.identity()}")
