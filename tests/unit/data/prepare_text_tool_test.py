# SPDX-License-Identifier: Apache-2.0
"""tools/prepare_text makes the files that data/prepare_text.py makes.

usage: prepare_text_tool_test.py PROGRAM SCRIPT FOLDER     (FOLDER is made anew)
"""
import os
import shutil
import subprocess
import sys

from token_reader import read_safetensors

program, script, work = sys.argv[1:]
shutil.rmtree(work, ignore_errors=True)
os.makedirs(work)
os.chdir(work)
TEXT = "".join(f"Line {i}: naïve façade, {i * i} €\n\n  indented 😀\n" for i in range(200))
EDGES = "".join(map(chr, [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF]))
MANY = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x14000)])) * 2


def write(name, data):
    with open(name, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def run(*command, status=0, message=""):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == status and message in result.stdout + result.stderr, (command, result)


def compare(*arguments):
    """All tensors and metadata of the three files are equal."""
    shutil.rmtree("ours", ignore_errors=True)
    shutil.rmtree("python", ignore_errors=True)
    files = [argument for argument in arguments if not argument.startswith("--")]
    options = [argument for argument in arguments if argument.startswith("--")]
    options = [word for option in options for word in option.split("=")]
    run(program, *files, "ours", *options)
    run(sys.executable, script, *files, "python", *options)
    assert sorted(os.listdir("ours")) == sorted(os.listdir("python"))
    for name in "train", "eval", "vocabulary":
        ours, python = (read_safetensors(f"{folder}/{name}.safetensors") for folder in ("ours", "python"))
        assert ours == python, (arguments, name, ours[1], python[1])


write("text.txt", TEXT)
write("edges.txt", EDGES * 5)
write("many.txt", MANY)
write("bytes.bin", bytes(range(256)) * 3)
compare("text.txt")
compare("bytes.bin")
compare("text.txt", "--tokenizer=chars", "--eval-fraction=0.25")
compare("edges.txt", "--tokenizer=chars", "--eval-fraction=0.5")
compare("many.txt", "--tokenizer=chars")  # more ids than U16 has
for count in 2, 5, 6:
    compare(*["text.txt", "edges.txt", "many.txt"] * (count // 3) + ["text.txt", "edges.txt"][:count % 3],
            "--tokenizer=chars", "--eval-fraction=0.5")

# Mistakes, each with the exit code of the script. The files of an earlier call stay.
before = read_safetensors("ours/train.safetensors")
write("bad.txt", b"fine\nalso fine\nbad \xe9 here\n")
write("empty.txt", "")
run(program, "bad.txt", "ours", "--tokenizer", "chars", status=65, message="bad.txt:3: invalid UTF-8")
run(program, "empty.txt", "ours", status=65, message="no text")
run(program, "missing.txt", "ours", status=65, message="cannot read missing.txt")
run(program, ".", "ours", status=65, message="cannot read .")
run(program, "text.txt", "ours", "--eval-fraction", "1e-20", status=65, message="evaluation set is empty")
run(program, "text.txt", "ours", "--eval-fraction", "0.99999999", status=65, message="training set is empty")
run(program, "text.txt", "ours", "--eval-fraction", "1", status=64, message="between 0 and 1")
run(program, "text.txt", "ours", "--tokenizer", "bpe", status=64, message="unknown argument --tokenizer bpe")
run(program, "text.txt", status=64, message="expected FILE and OUT_DIR")
run(program, "text.txt", "text.txt/below", status=73, message="cannot")
run(program, "--help", message="usage: prepare_text FILE")
assert read_safetensors("ours/train.safetensors") == before
print("equal to prepare_text.py")
