# SPDX-License-Identifier: Apache-2.0
"""Arrays that NumPy writes are read with the same bytes.

usage: npy_test.py UNIT_DATA
"""

import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SHAPES = [(), (0,), (7,), (2, 3), (3, 0, 2), (2, 3, 4, 5)]


def write(folder, name, array, version):
    with open(folder / f"{name}.npy", "wb") as file:
        numpy.lib.format.write_array(file, array, version=version, allow_pickle=False)
    (folder / f"{name}.bytes").write_bytes(array.tobytes(order="C"))
    (folder / f"{name}.shape").write_text(" ".join(map(str, array.shape)))


def main():
    random = numpy.random.default_rng(5)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        number = 0
        for dtype in DTYPES:
            for shape in SHAPES:
                values = (random.standard_normal(shape) * 100).astype("int64").astype(dtype)
                for order in "CF":
                    version = [(1, 0), (2, 0), (3, 0)][number % 3]
                    write(folder, f"{number}_{dtype}_{order}", numpy.array(values, order=order), version)
                    number += 1
        # A view of every second column is copied by NumPy before it is saved.
        write(folder, "view", random.standard_normal((4, 6))[:, ::2], None)
        result = subprocess.run(
            [sys.argv[1], "[.numpy]"],
            env=os.environ | {"DDP_NUMPY_FILES": name},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(result.stdout)
        assert f"{number + 1} files of NumPy" in result.stdout


if __name__ == "__main__":
    main()
