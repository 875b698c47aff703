# SPDX-License-Identifier: Apache-2.0
"""data/prepare_cifar10.py on folders of class folders, with and without train|test above them.

usage: prepare_cifar10_test.py SCRIPT FOLDER     (FOLDER is made anew)
"""
import os
import shutil
import subprocess
import sys
import tarfile

script, work = sys.argv[1:]
shutil.rmtree(work, ignore_errors=True)
JPEG = b"\xff\xd8 not looked into: JPEG goes into shards byte for byte, "


def make(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(JPEG + path.encode())


def prepare(*arguments):
    return subprocess.run([sys.executable, script, *arguments, "--format", "tar", "--labels", "folder"],
                          capture_output=True, text=True)


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

check("all for training", prepare(f"{work}/plain", f"{work}/o1"), f"{work}/o1",
      ["cat", "dog", "emu"] * 4, [])
check("some for testing", prepare(f"{work}/plain", f"{work}/o2", "--test", "3"), f"{work}/o2",
      ["cat", "dog", "emu"] * 3, ["cat", "dog", "emu"])
check("limited", prepare(f"{work}/plain", f"{work}/o3", "--test", "3", "--train", "6"), f"{work}/o3",
      ["cat", "dog", "emu"] * 2, ["cat", "dog", "emu"])
check("split by folder", prepare(f"{work}/split", f"{work}/o4"), f"{work}/o4",
      ["cat", "dog", "emu"] * 3, ["cat", "dog", "emu"])
with tarfile.open(f"{work}/plain.tar", "w") as archive:
    for kind in "cat", "dog":
        archive.add(f"{work}/plain/{kind}", kind)
check("archive", prepare(f"{work}/plain.tar", f"{work}/o5", "--test", "2"), f"{work}/o5",
      ["cat", "dog"] * 3, ["cat", "dog"])
refused = prepare(f"{work}/plain", f"{work}/o6", "--test", "12")
assert refused.returncode != 0 and "--test 12 of 12 images" in refused.stderr, refused.stderr
print("6 layouts")
