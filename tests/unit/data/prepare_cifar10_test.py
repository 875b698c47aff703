# SPDX-License-Identifier: Apache-2.0
"""data/prepare_cifar10.py on folders of class folders, with and without train|test above them, and how it
ends where something is wrong.

usage: prepare_cifar10_test.py SCRIPT FOLDER     (FOLDER is made anew)
"""

import importlib.util
import os
import pickle
import shutil
import sys
import tarfile

from token_reader import refused, run_script

script, work = sys.argv[1:]
shutil.rmtree(work, ignore_errors=True)
JPEG = b"\xff\xd8 not looked into: JPEG goes into shards byte for byte, "


def make(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(JPEG + path.encode())


def prepare(*arguments):
    return run_script(script, *arguments, "--format", "tar", "--labels", "folder")


def classes_in(shard):
    with tarfile.open(shard) as archive:
        return sorted(member.name.split("/")[0] for member in archive)


def check(name, result, out, train, test):
    assert result.returncode == 0, (name, result.stderr)
    assert classes_in(f"{out}/train-000.tar") == sorted(train), (name, result.stdout)
    got = classes_in(f"{out}/test-000.tar") if os.path.exists(f"{out}/test-000.tar") else []
    assert got == sorted(test), (name, got)
    with open(f"{out}/classes.txt") as f:
        assert f.read().split() == sorted(set(train + test)), name


for kind in "cat", "dog", "emu":
    for i in range(4):
        make(f"{work}/plain/{kind}/{i}.jpg")
        make(f"{work}/split/{'test' if i == 0 else 'train'}/{kind}/{i}.jpg")
make(f"{work}/plain/cover.jpg")  # of no class
make(f"{work}/split/docs/cover.jpg")  # beside the two folders

check("all for training", prepare(f"{work}/plain", f"{work}/o1"), f"{work}/o1", ["cat", "dog", "emu"] * 4, [])
check(
    "some for testing",
    prepare(f"{work}/plain", f"{work}/o2", "--test", "3"),
    f"{work}/o2",
    ["cat", "dog", "emu"] * 3,
    ["cat", "dog", "emu"],
)
check(
    "limited",
    prepare(f"{work}/plain", f"{work}/o3", "--test", "3", "--train", "6"),
    f"{work}/o3",
    ["cat", "dog", "emu"] * 2,
    ["cat", "dog", "emu"],
)
check(
    "split by folder",
    prepare(f"{work}/split", f"{work}/o4"),
    f"{work}/o4",
    ["cat", "dog", "emu"] * 3,
    ["cat", "dog", "emu"],
)
with tarfile.open(f"{work}/plain.tar", "w") as archive:
    for kind in "cat", "dog":
        archive.add(f"{work}/plain/{kind}", kind)
check(
    "archive",
    prepare(f"{work}/plain.tar", f"{work}/o5", "--test", "2"),
    f"{work}/o5",
    ["cat", "dog"] * 3,
    ["cat", "dog"],
)

# What is left out is counted, with its first names.
make(f"{work}/more/cat/a.jpg")
for name in "more/cat/a.gif", "more/cat/b.txt", "more/cover.jpg", "more/notes":
    make(f"{work}/{name}")
os.symlink("cat", f"{work}/more/dog")
result = prepare(f"{work}/more", f"{work}/o7")
assert "1 training and 0 test images, 1 classes\nleft out: 5 files" in result.stdout, result.stdout
assert f"({work}/more/dog, {work}/more/cover.jpg, {work}/more/notes, …)" in result.stdout, result.stdout
assert "left out: 1 files" in prepare(f"{work}/split", f"{work}/o4").stdout
assert "left out" not in prepare(f"{work}/plain.tar", f"{work}/o5").stdout


# The same command gives the same bytes.
result = prepare(f"{work}/plain", f"{work}/o8", "--test", "3")
for name in sorted(os.listdir(f"{work}/o2")):
    with open(f"{work}/o2/{name}", "rb") as one, open(f"{work}/o8/{name}", "rb") as other:
        assert one.read() == other.read(), name


def write(name, data):
    os.makedirs(os.path.dirname(f"{work}/{name}"), exist_ok=True)
    with open(f"{work}/{name}", "wb") as f:
        f.write(data)
    return f"{work}/{name}"


# Binary records to binary records, which needs no package.
record = bytes([7]) + bytes(range(256)) * 12
binary = os.path.dirname(write("batches/data_batch_1.bin", record * 3))
result = run_script(script, binary, f"{work}/o6", "--train", "2")
assert result.returncode == 0, result.stderr
with open(f"{work}/o6/cifar-10-batches-bin/data_batch_1.bin", "rb") as f:
    assert f.read() == record

# A mistake in the call: 64.
out = f"{work}/none"
plain = [f"{work}/plain", out, "--format", "tar"]
refused(script, 64, ["usage", "paths"])
refused(script, 64, ["one SOURCE and one OUT_DIR"], "a", "b", "c")
refused(script, 64, ["counts must not be negative"], *plain, "--shards", "0")
refused(script, 64, ["invalid choice: 'zip'"], f"{work}/plain", out, "--format", "zip")
refused(script, 64, ["--test 12 of 12 images"], *plain, "--test", "12")
for i in range(11):
    make(f"{work}/many/class{i}/0.jpg")
refused(script, 64, ["10 classes, but the source 11", "--format tar"], f"{work}/many", out)
make(f"{work}/long/{'x' * 200}/0.jpg")
refused(script, 64, ["--labels cls"], f"{work}/long", out, "--format", "tar", "--labels", "folder")

# A source that cannot be used: 65, with its name.
os.makedirs(f"{work}/empty")
refused(script, 65, ["missing.tar: there is no such"], f"{work}/missing.tar", out)
refused(script, 65, ["empty: contains no CIFAR-10 data"], f"{work}/empty", out)
refused(script, 65, ["bad.tar: not a readable archive"], write("bad.tar", b"no archive"), out)
with tarfile.open(f"{work}/batches.tar.gz", "w:gz") as archive:
    archive.add(binary, "cifar-10-batches-bin")
with open(f"{work}/batches.tar.gz", "rb") as f:
    refused(script, 65, ["cut.tar.gz: not a readable archive"], write("cut.tar.gz", f.read()[:-40]), out)
for name, data, message in (
    ("short/test_batch.bin", record[:-1], "3072 bytes are not a multiple"),
    ("labels/data_batch_2.bin", record + bytes([10]) + record[1:], "label 10 at offset 3073"),
    ("pickles/data_batch_3", b"no pickle", "not a batch of CIFAR-10"),
    ("foreign/test_batch", pickle.dumps(os.path.join), "does not belong in"),
    ("lacking/test_batch", pickle.dumps({b"labels": [1]}), "KeyError: b'data'"),
    ("thin/test_batch", pickle.dumps({b"labels": [1], b"data": [b"1"]}), "an image of 1 bytes"),
    ("eleven/test_batch", pickle.dumps({b"labels": [11], b"data": [record[1:]]}), "label 11"),
):
    refused(script, 65, [name, message], os.path.dirname(write(name, data)), out)
if importlib.util.find_spec("PIL"):
    refused(script, 65, ["plain/", ".jpg: not a readable image"], f"{work}/plain", out)
else:
    refused(script, 64, ["needs Pillow"], f"{work}/plain", out)
os.environ.update(
    dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1"), no_proxy="", NO_PROXY=""
)
refused(script, 65, ["cannot download", "give the archive as SOURCE"], f"{work}/download")
assert not os.path.exists(out), os.listdir(out)

# OUT_DIR cannot be written: 73; what an earlier call made stays.
for arguments in (
    [*plain[:1], f"{work}/plain.tar", "--format", "tar"],
    [binary, f"{work}/plain.tar"],
    [f"{work}/plain.tar"],
):
    refused(script, 73, ["plain.tar", "cannot write"], *arguments)
refused(script, 73, ["cannot write"], binary, f"{work}/o6", largest_file=2048)
assert sorted(os.listdir(f"{work}/o6/cifar-10-batches-bin")) == [
    "batches.meta.txt",
    "data_batch_1.bin",
    "data_batch_2.bin",
]
with open(f"{work}/o6/cifar-10-batches-bin/data_batch_1.bin", "rb") as f:
    assert f.read() == record
print("7 layouts, 3 exit codes")
