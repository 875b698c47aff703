# SPDX-License-Identifier: Apache-2.0
"""What a reader meets first: README's speeds are those of docs/performance.md, and scripts/env.sh prepares a
shell for its commands."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest

from study_support import ROOT

ENV = os.path.join(ROOT, "scripts", "env.sh")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def rows(page):
    """The cells of each row of a page's tables."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in read(page).splitlines()
        if line.startswith("| ")
    ]


class Speeds(unittest.TestCase):
    def test_each_speed_is_that_of_the_page(self):
        measured = [row for row in rows("docs/performance.md") if len(row) == 5]
        speeds = [row for row in rows("README.md") if re.fullmatch(r"~?\d\.\d\d", row[-1])]
        self.assertGreaterEqual(len(speeds), 5)
        for workload, own, other, ratio in speeds:
            with self.subTest(workload):
                model = workload.split(",")[0]
                peer = other.split(", ")[0]
                same = [row for row in measured if row[0].startswith(model) and row[2] == own]
                self.assertIn(
                    ("1 H200", own, peer, ratio),
                    [(row[1], row[2], row[3].split(", ")[0], row[4].rstrip(" +")) for row in same],
                )
                quotient = float(own.replace(",", "")) / float(peer.replace(",", ""))
                self.assertEqual(f"{quotient:.2f}", ratio.lstrip("~"))

    def test_the_slowest_peer_of_a_row_is_not_taken(self):
        """A row of the page that names several sides of PyTorch: README has the fastest."""
        measured = [row for row in rows("docs/performance.md") if len(row) == 5]
        for workload, own, other, _ in (row for row in rows("README.md") if re.match(r"~?\d\.\d\d", row[-1])):
            peers = [row[3] for row in measured if row[1] == "1 H200" and row[2] == own]
            fastest = max(float(peer.split(", ")[0].replace(",", "")) for peer in peers)
            self.assertEqual(other.split(", ")[0], f"{fastest:,.0f}", workload)


class Shell(unittest.TestCase):
    def source(self, command, shell="bash", **environment):
        done = subprocess.run(
            [shell, "-c", f'source "{ENV}" && {command}'],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": "/", **environment},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def variables(self, **environment):
        return dict(line.split("=", 1) for line in self.source("env", **environment).splitlines())

    def test_the_page_names_every_variable(self):
        with tempfile.TemporaryDirectory() as folder:
            variables = self.variables(DDP_VENV=folder)
        made = {name for name in variables if re.match("OMPI|PRTE|NCCL|OMP_", name)}
        self.assertEqual(variables["NCCL_NVLS_ENABLE"], "0")
        self.assertFalse([name for name in variables if name.startswith("_ddp")])
        named = set(re.findall(r"`(\w+)(?=[`,…])", read("docs/running.md").split("## Launchers")[0]))
        prefix = "PRTE_MCA_"
        self.assertEqual(
            {name if not name.startswith(prefix) else prefix for name in made}
            - {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"},  # "…_CONFIRM"
            {name for name in named if name in made | {prefix}},
        )
        for name in made - {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}:
            self.assertTrue(name in named or name.startswith(prefix), f"docs/running.md lacks {name}")

    def test_what_is_set_stays(self):
        given = dict(NCCL_NVLS_ENABLE="1", OMPI_MCA_hwloc_base_binding_policy="core")
        variables = self.variables(**given)
        for name, value in given.items():
            self.assertEqual(variables[name], value)

    def test_the_installed_tools_come_first_and_once(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "bin"))
            path = self.source(f'source "{ENV}" && echo "$PATH"', DDP_VENV=folder).strip()
            self.assertEqual(path, f"{folder}/bin:{os.environ['PATH']}")
            os.rmdir(os.path.join(folder, "bin"))
            self.assertEqual(self.source('echo "$PATH"', DDP_VENV=folder).strip(), os.environ["PATH"])

    def test_zsh(self):
        zsh = shutil.which("zsh")
        if zsh is None:
            self.skipTest("zsh is not installed")
        self.assertEqual(self.source("echo $NCCL_NVLS_ENABLE", shell=zsh), "0\n")

    def test_more_ranks_than_cores_start_unbound(self):
        if shutil.which("mpirun") is None:
            self.skipTest("mpirun is not installed")
        cores = len(os.sched_getaffinity(0))
        ranks = os.cpu_count() + 1
        numbers = "$OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK $(env -u OMP_NUM_THREADS nproc)"
        said = self.source(f"mpirun -n {ranks} bash -c 'echo {numbers}'")
        self.assertEqual(
            sorted(said.splitlines()), sorted(f"{rank} {rank} {cores}" for rank in range(ranks)), said
        )


if __name__ == "__main__":
    unittest.main()
