# SPDX-License-Identifier: Apache-2.0
"""Numbers in texts do not follow the program's locale, and files are opened by the one function of their
language: no source of the library, its models, programs and tools goes around
libddp/include/ddp/detail/text.hpp, core/files/file_ops.hpp and tools/scaling/files.py."""

import os
import re
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
RULES = {
    ".cpp": [
        (
            r"std::o?stringstream|c10::(str|Join)\(",
            "a number in it follows std::locale::global; fix: concat() or TextStream",
        ),
        (
            r"std::sto(d|f|ld)\(|strto(d|f|ld)\(|\bato[fil]\(",
            "it follows std::setlocale; fix: std::from_chars",
        ),
        (
            r"std::o?fstream|fopen\(|basic_file_sink",
            "it follows links and waits at pipes; fix: replace_file() or AppendedFile",
        ),
        (r"std::ifstream", "it waits at pipes; fix: read_start()"),
    ],
    ".py": [
        (
            r"(?<![.\w])open\((?!.*opener=)",
            "it follows links and waits at pipes; fix: opener=regular of scaling/files.py",
        ),
        (
            r"\.(write|read)_(text|bytes)\(|json\.dump\(",
            "it follows links; fix: replace_file() of scaling/files.py",
        ),
    ],
}
# What the kernel makes, what a text stream is made of, and a file that was checked.
ALLOWED = {
    "libddp/ops/include/ddp/detail/text_stream.hpp": "class TextStream : public std::ostringstream {",
    "libddp/src/train/checkpoint/folder_owner.cpp": '"/proc/',
    "tools/cluster_check/health.cpp": "std::ifstream file(",
    "tools/run_top/doctor.py": '"/proc/',
    "tools/run_top/folder.py": 'open("/proc/',
    "examples/common/data_path.cpp": "std::ifstream cache(path);",
}


def sources():
    for top in ("libddp", "models", "examples", "tools"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            for name in names:
                yield os.path.join(folder, name)


class FileAccess(unittest.TestCase):
    def test_no_source_goes_around_the_functions(self):
        found, count = [], 0
        for path in sources():
            ending = os.path.splitext(path)[1].replace(".hpp", ".cpp")
            name = os.path.relpath(path, ROOT)
            if ending not in RULES or name == "tools/scaling/files.py":
                continue
            count += 1
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    code = line.split("//")[0] if ending == ".cpp" else line
                    found += [
                        f"{name}:{number}: {line.strip()}: {why}"
                        for pattern, why in RULES[ending]
                        if re.search(pattern, code) and not (name in ALLOWED and ALLOWED[name] in line)
                    ]
        self.assertGreater(count, 300)
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
