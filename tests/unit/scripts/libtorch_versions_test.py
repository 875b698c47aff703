# SPDX-License-Identifier: Apache-2.0
"""CMake, scripts, packages and pages name the lowest and the default version that docs/libtorch_versions.md
has tried."""

import os
import re
import unittest

from study_support import ROOT


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


class Versions(unittest.TestCase):
    def setUp(self):
        """Versions of the page's table, as "2.11.0"."""
        self.tried = re.findall(r"^\| (\d+\.\d+\.\d+) \|", read("docs/libtorch_versions.md"), re.MULTILINE)

    def assert_only(self, path, pattern, version):
        self.assertEqual(set(re.findall(pattern, read(path))), {version}, path)

    def test_the_lowest_version_was_tried(self):
        lowest = min(self.tried, key=lambda version: [int(part) for part in version.split(".")]).rsplit(
            ".", 1
        )[0]
        self.assert_only("cmake/DdpDependencies.cmake", r"find_package\(LibTorch ([\d.]+) REQUIRED\)", lowest)
        self.assert_only("scripts/setup.sh", r"DDP_TORCH_MINIMUM=([\d.]+)", lowest)
        self.assert_only("packaging/spack/package.py", r"py-torch@([\d.]+):", lowest)
        self.assert_only("README.md", r"LibTorch ([\d.]+)\s+or\s+newer", lowest)

    def test_the_default_was_tried_and_is_the_same_everywhere(self):
        default = re.search(r"DDP_TORCH_VERSION:=([\d.]+)\}", read("scripts/setup.sh")).group(1)
        self.assertIn(default, self.tried)
        for path in (
            "docs/packages.md",
            "docs/reproduce.md",
            "packaging/docker/Dockerfile",
            "packaging/apptainer/libddp.def",
            "packaging/python/torch_requirement.py",
        ):
            self.assert_only(path, r"torch==(\d+\.\d+\.\d+)", default)


if __name__ == "__main__":
    unittest.main()
