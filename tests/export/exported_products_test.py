# SPDX-License-Identifier: Apache-2.0
"""A folder of save_pretrained and adapters of PEFT are trained in C++ and go back to Python:
benchmarks/exported_curves on the embedded samples, in which both sides must agree.

usage: exported_products_test.py BUILD SOURCES
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

for package in ("peft", "safetensors", "torch", "torchvision", "transformers"):
    if importlib.util.find_spec(package) is None:  # importing them takes as long as the trainings
        print("skipped: there is no package", package)
        sys.exit(77)

BUILD, SOURCES = (pathlib.Path(path).resolve() for path in sys.argv[1:])


def main():
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        data = work / "data"
        data.mkdir()
        for name in ("chat", "text"):
            (data / name).symlink_to(SOURCES / f"data/{name}-sample")
        done = subprocess.run(
            [sys.executable, SOURCES / "benchmarks/exported_curves", BUILD, data, work / "out"]
            + ["--products", "pretrained,lora", "--steps", "6", "--window", "2", "--base-steps", "4"],
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        print(done.stdout)
        for log in work.glob("out/*/*.log") if done.returncode else ():
            print(log.read_text()[-2000:])
        assert done.returncode == 0, done.returncode


main()
