# SPDX-License-Identifier: Apache-2.0
"""Command lines of the tools."""

import argparse
import contextlib
import sys

from .numbers import DataError
from .terminal import guarded

EXIT_MISTAKE = 64  # in the call
EXIT_UNUSABLE_DATA = 65
EXIT_CANNOT_WRITE = 73


class StudyError(Exception):
    """A user's mistake in a study."""


class WriteError(Exception):
    """A file that the system does not let us write."""


@contextlib.contextmanager
def writing(folder):
    """Around what writes to `folder`, which --output named."""
    try:
        yield
    except BrokenPipeError:  # standard output's
        raise
    except OSError as error:
        raise WriteError(
            f"{error.filename or folder}: cannot write: {error.strerror or error}; "
            "fix: name another folder (--output), or make room or the rights to write there"
        ) from None


def exit_code(main, arguments):
    """What main() returns, or the exit code of its error, which is printed. Nothing that is printed controls
    the terminal."""
    with guarded():
        try:
            return main(arguments)
        except (DataError, StudyError, WriteError) as error:
            print(f"error: {error}", file=sys.stderr)
            codes = {DataError: EXIT_UNUSABLE_DATA, StudyError: EXIT_MISTAKE, WriteError: EXIT_CANNOT_WRITE}
            return next(code for kind, code in codes.items() if isinstance(error, kind))


class Parser(argparse.ArgumentParser):
    """Shows the tool's docstring as it is written; a mistake in the call ends with EXIT_MISTAKE."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(EXIT_MISTAKE, f"error: {message}\n")
