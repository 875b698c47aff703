# SPDX-License-Identifier: Apache-2.0
"""The description of a machine: without GPUs, and with an imitated nvidia-smi."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT

TOOL = os.path.join(ROOT, "tools", "system_report.py")

NVIDIA_SMI = r"""#!/bin/sh
case "$*" in
  *driver_version*) echo 580.01; echo 580.01 ;;
  --query-gpu=index*)
    for i in 0 1; do
      echo "$i, NVIDIA H200, 143771 MiB, 700.00 W, 1980 MHz, 3201 MHz, 5, 16, Enabled, Enabled, Default"
    done ;;
  "topo -m") printf '\033[4mGPU0\tGPU1\033[0m\nGPU0\t X\tNV18\n' ;;
  "nvlink --status")
    for g in 0 1; do
      echo "GPU $g: NVIDIA H200 (UUID: GPU-$g)"
      for l in 0 1 2; do echo "	 Link $l: 26.562 GB/s"; done
    done ;;
  -q) printf '    MIG Mode\n        Current                           : Disabled\n' ;;
esac
"""


class System(unittest.TestCase):
    def report(self, path, build="nowhere"):
        done = subprocess.run(
            [sys.executable, TOOL, "--build", build],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_machine_with_nothing(self):
        text = self.report("/nonexistent")
        for line in (
            "none is seen (no nvidia-smi",
            "NVLink: none",
            "| MPI | none |",
            "| NVIDIA driver | none |",
            "| memory | ",
            "| libddp | 0.",
            "| libddp's commit | ",
        ):
            self.assertIn(line, text)

    def test_versions_of_an_install_tree_come_from_its_program(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(ROOT, "tools"), os.path.join(folder, "tools"))
            program = os.path.join(folder, "train")
            with open(program, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\nprintf 'libddp    0.9.1 (commit abc12)\\nLibTorch  2.99.0\\n'\n")
            os.chmod(program, 0o755)
            done = subprocess.run(
                [sys.executable, os.path.join(folder, "tools", "system_report.py"), "--program", program],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": folder},
            )
        for line in ("| libddp | 0.9.1 |", "| libddp's commit | abc12 |", "| LibTorch | 2.99.0 |"):
            self.assertIn(line, done.stdout)

    def test_gpus_and_links(self):
        with tempfile.TemporaryDirectory() as folder:
            tool = os.path.join(folder, "nvidia-smi")
            with open(tool, "w", encoding="utf-8") as file:
                file.write(NVIDIA_SMI)
            os.chmod(tool, 0o755)
            text = self.report(folder + ":" + os.environ["PATH"])
        for line in (
            "| 1 | NVIDIA H200 | 143771 MiB | 700.00 W | 1980 MHz | 3201 MHz | gen 5 x16 | Enabled | Enabled "
            "| Default |",
            "NVLink: 3 links of 26.562 GB/s a GPU",
            "MIG: Disabled",
            "| NVIDIA driver | 580.01 |",
            "GPU0\t X\tNV18",
        ):
            self.assertIn(line, text)
        self.assertNotIn("\x1b", text)

    def test_libtorch_of_the_build(self):
        with tempfile.TemporaryDirectory() as folder:
            torch = os.path.join(folder, "torch")
            os.mkdir(torch)
            with open(os.path.join(folder, "CMakeCache.txt"), "w", encoding="utf-8") as file:
                file.write(f"LIBTORCH_USED_ROOT:INTERNAL={torch}\nLIBTORCH_USED_VERSION:INTERNAL=2.11.0\n")
            self.assertIn("| LibTorch | 2.11.0 |", self.report(os.environ["PATH"], folder))
            with open(os.path.join(torch, "version.py"), "w", encoding="utf-8") as file:
                file.write("from typing import Optional\n__version__ = '2.11.0+cu130'\n")
            self.assertIn("| LibTorch | 2.11.0+cu130 |", self.report(os.environ["PATH"], folder))

    def test_a_mistake_in_the_call(self):
        done = subprocess.run([sys.executable, TOOL, "--ouput", "x"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 64)
        self.assertIn("error: unrecognized arguments: --ouput x", done.stderr)

    def test_the_file_is_whole_or_absent(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "SYSTEM.md")
            subprocess.run([sys.executable, TOOL, "--output", path], check=True)
            self.assertEqual(os.listdir(folder), ["SYSTEM.md"])
            path = os.path.join(folder, "missing", "x.md")
            done = subprocess.run([sys.executable, TOOL, "--output", path], capture_output=True, text=True)
            self.assertEqual(
                (done.returncode, done.stderr),
                (73, f"error: {path} cannot be written: No such file or directory\n"),
            )


if __name__ == "__main__":
    unittest.main()
