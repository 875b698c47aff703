#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the report: report.pdf and report.html, from report.typ and data/*.csv.

    pip install -r docs/report/requirements.txt
    docs/report/build.py
    docs/report/build.py --output FOLDER
    docs/report/build.py --check              # the sources alone; needs nothing but Python

The sources are checked first: an unknown value, a number of its own in the text, or a value that differs from
the page that its run names ends the build. The page report.html needs nothing beside it.

Exit codes: 0 built, 64 a mistake in the call, 65 sources with problems (all are printed), 69 the package
typst is missing, 73 the files cannot be written.
"""

import argparse
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
sys.dont_write_bytecode = True
from check import check  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(FOLDER))
EXPECTED_WARNINGS = (
    "html export is under active development",
    "page set rule was ignored",
    "align was ignored",
)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(64, f"error: {message}\n")


def fail(code, *lines):
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return code


def compile_report(source):
    """{file name: bytes}; raises typst.TypstError."""
    import typst  # checking the sources needs no package

    built = {}
    for kind in ("pdf", "html"):
        # Fonts of the package alone: equal pages on every machine.
        compiler = typst.Compiler(source, ignore_system_fonts=True)
        built[f"report.{kind}"], warnings = compiler.compile_with_warnings(format=kind)
        for warning in warnings:
            if not warning.message.startswith(EXPECTED_WARNINGS):
                print(f"warning: {kind}: {warning.message}", file=sys.stderr)
    with open(os.path.join(FOLDER, "report.css"), "rb") as file:
        style = b"<style>\n" + file.read() + b"</style>\n</head>"
    built["report.html"] = built["report.html"].replace(b"</head>", style, 1)
    return built


def main(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", metavar="FOLDER", default=FOLDER, help="where the two files go (docs/report)"
    )
    parser.add_argument("--check", action="store_true", help="check the sources, build nothing")
    options = parser.parse_args(arguments)
    problems = check(FOLDER, ROOT)
    if problems:
        return fail(65, *problems)
    if options.check:
        print("the sources of the report are sound")
        return 0
    try:
        import typst
    except ImportError:
        return fail(69, "the package typst is missing; fix: pip install -r docs/report/requirements.txt")
    try:
        built = compile_report(os.path.join(FOLDER, "report.typ"))
    except typst.TypstError as error:
        return fail(65, error.diagnostic or error.message)
    try:
        os.makedirs(options.output, exist_ok=True)
        for name, content in built.items():
            path = os.path.join(options.output, name)
            with open(path, "wb") as file:
                file.write(content)
            print(f"{path}: {len(content) // 1024} KiB")
    except OSError as error:
        return fail(
            73, f"{error.filename}: cannot write: {error.strerror}; fix: name another folder (--output)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
