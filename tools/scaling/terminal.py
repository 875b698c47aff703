# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows. Names of files, columns and hosts, and words of other programs, may hold its control
characters."""

import contextlib
import sys
import unicodedata

CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # categories: controls, broken UTF-8, separators of lines
REORDERING = "\u061c\u200e\u200f" + "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))


def is_control(character):
    return unicodedata.category(character) in CONTROLS or character in REORDERING


def printable(text):
    """The text with escapes such as \\x1b in place of what controls a terminal or reorders text. Tabs and
    ends of lines stay."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if is_control(c) and c not in "\n\t" else c for c in text
    )


class Printable:
    """A text stream that shows printable() text."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(printable(text))

    def writelines(self, lines):
        self.stream.writelines(map(printable, lines))

    def __getattr__(self, name):
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded():
    """All that is printed inside, errors and usage too, is printable."""
    with contextlib.redirect_stdout(Printable(sys.stdout)), contextlib.redirect_stderr(Printable(sys.stderr)):
        yield


@contextlib.contextmanager
def unguarded():
    """Inside guarded(): for a package that colours its own messages."""
    with (
        contextlib.redirect_stdout(getattr(sys.stdout, "stream", sys.stdout)),
        contextlib.redirect_stderr(getattr(sys.stderr, "stream", sys.stderr)),
    ):
        yield
