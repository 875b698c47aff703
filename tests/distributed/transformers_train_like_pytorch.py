# SPDX-License-Identifier: Apache-2.0
"""gpt2_ddp, bert_ddp and vit_ddp train like PyTorch: benchmarks/transformer_curves with small models in
float32.

usage: transformers_train_like_pytorch.py BUILD SOURCES
"""

import os
import pathlib
import random
import subprocess
import sys
import tempfile

try:
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

BUILD, SOURCES = sys.argv[1], pathlib.Path(sys.argv[2])
NUM_IMAGES = 45  # an epoch of five batches of 8, and a batch that is left out


def write_data(folder):
    (folder / "gpt2").symlink_to(SOURCES / "data/text-sample")
    (folder / "bert").symlink_to(SOURCES / "data/masked-text-sample")
    images = folder / "cifar10/cifar-10-batches-bin"
    images.mkdir(parents=True)
    random.seed(1)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        records = [bytes([random.randrange(10)]) + random.randbytes(3072) for _ in range(NUM_IMAGES // 5)]
        (images / f"{name}.bin").write_bytes(b"".join(records))


def compare(out, data, *arguments):
    program = SOURCES / "benchmarks/transformer_curves"
    result = subprocess.run(
        [sys.executable, program, "--tiny", "--device", "cpu", BUILD, data, out, *arguments],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    print(result.stdout)
    return result.returncode


def main():
    with tempfile.TemporaryDirectory() as work:
        data, out = pathlib.Path(work, "data"), pathlib.Path(work, "out")
        data.mkdir()
        write_data(data)
        code = compare(out, data)
        if code != 0:
            for log in out.glob("*/*.log"):
                print(log.read_text()[-2000:])
        assert code == 0, code
        code = compare(out, data, "--models", "vit", "--sides", "fp32", "optimizer.beta2=0.99")
        assert code == 1, "another optimizer was not noticed"


main()
