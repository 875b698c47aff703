# SPDX-License-Identifier: Apache-2.0
"""bert_ddp continues from a folder in the layout of the first BERT releases. Standard library only.

usage: bert_ddp_pretrained.py BERT_DDP SOURCES
"""

import csv
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile

PROGRAM, SOURCES = sys.argv[1], pathlib.Path(sys.argv[2])
sys.path.insert(0, str(SOURCES / "data"))
from text_tokenizers import BERT_TOKENS  # noqa: E402
from token_files import Documents, Vocabulary, write_folder  # noqa: E402

GOLDEN = SOURCES / "tests/golden/lm/bert"  # 53 ids, 24 positions
WORDS = BERT_TOKENS + [f"word{i}" for i in range(48)]


def write_data(folder):
    random.seed(3)
    vocabulary = Vocabulary(
        "by hand", [(word.encode(), word in BERT_TOKENS) for word in WORDS], end_of_text=3
    )
    splits = {"train": Documents(len(WORDS)), "eval": Documents(len(WORDS))}
    for name, count in ("train", 200), ("eval", 40):
        for _ in range(count):
            splits[name].add([2] + random.choices(range(5, 25), k=random.randint(4, 20)), end=3)
    write_folder(folder, vocabulary, splits, "by hand")


def write_base(folder, words):
    folder.mkdir()
    for name in "config.json", "model.safetensors":
        shutil.copy(GOLDEN / name, folder)
    added = [{"id": i, "content": word, "special": True} for i, word in enumerate(BERT_TOKENS)]
    vocab = {word: i for i, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "model": {"type": "WordPiece", "vocab": vocab}}), encoding="utf-8"
    )


def read_tensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def run(work, name, base, *settings):
    return subprocess.run(
        [
            PROGRAM,
            "context.device=cpu",
            "model.init=pretrained",
            f"model.path={base}",
            f"tokens.path={work / 'data'}",
            "tokens.max_seq_len=24",
            "train.batch_size=8",
            "train.eval_first=true",
            "lr_schedule.type=constant",
            "lr_schedule.warmup_steps=0",
            "loader.num_workers=1",
            f"metrics.dir={work}",
            f"metrics.run_name={name}",
            *settings,
        ],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def check_unchanged_weights(work):
    """Without a learning rate the checkpoint holds the folder's weights, bit by bit."""
    checkpoint = work / "checkpoint"
    result = run(
        work, "still", work / "base", "train.max_steps=2", "lr_schedule.lr=0", f"checkpoint.dir={checkpoint}"
    )
    assert result.returncode == 0, result.stdout
    assert "tokenizer of" not in result.stdout, result.stdout
    saved = read_tensors(next(checkpoint.glob("step_*/model.safetensors")))
    names = set()
    for name, tensor in read_tensors(GOLDEN / "model.safetensors").items():
        if name.startswith("bert.pooler.") or name == "cls.predictions.decoder.bias":
            continue  # unused, and the second name of a bias
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        assert saved[name] == tensor, f"{name} differs from the folder's"
        names.add(name)
    assert {name for name in saved if name.startswith(("bert.", "cls."))} == names, saved.keys()
    print(f"{len(names)} tensors equal the folder's")


def check_training(work):
    result = run(
        work,
        "trained",
        work / "base",
        "train.max_steps=30",
        "train.eval_every_steps=30",
        "lr_schedule.lr=0.01",
    )
    assert result.returncode == 0, result.stdout
    with open(work / "trained" / "evals.csv", encoding="ascii") as file:
        losses = [float(row["eval_loss"]) for row in csv.DictReader(file)]
    print(f"evaluation loss {losses[0]:.4f} before training, {losses[-1]:.4f} after")
    assert losses[-1] < 0.9 * losses[0], "the loss did not fall"


def check_other_tokenizer(work):
    write_base(work / "other", WORDS[:7] + [WORDS[8], WORDS[7]] + WORDS[9:])
    result = run(work, "refused", work / "other", "train.max_steps=2")
    assert result.returncode == 65, (result.returncode, result.stdout)
    message = "they differ in 2 ids, the first 7, which is 'word2' in "
    assert message in result.stdout and "and 'word3' in " in result.stdout, result.stdout
    print("another tokenizer is refused")


def main():
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        write_data(work / "data")
        write_base(work / "base", WORDS)
        check_unchanged_weights(work)
        check_training(work)
        check_other_tokenizer(work)


main()
