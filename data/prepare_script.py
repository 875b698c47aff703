# SPDX-License-Identifier: Apache-2.0
"""What the prepare scripts have in common: errors with their exit codes, command lines, files that come into
being all at once. Standard library only.
"""

import argparse
import os
import secrets
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
from scaling.files import regular
from scaling.terminal import guarded

EXIT_SETTINGS, EXIT_DATA, EXIT_CANNOT_WRITE = 64, 65, 73


class PrepareError(Exception):
    """A user's mistake; `where` is a file, with a line where there is one."""

    exit_code = EXIT_DATA

    def __init__(self, message, where=None, line=None):
        place = f"{where}:{line}: " if line is not None else f"{where}: " if where else ""
        super().__init__(place + message)


class UsageError(PrepareError):
    exit_code = EXIT_SETTINGS


class WriteError(PrepareError):
    exit_code = EXIT_CANNOT_WRITE


class Parser(argparse.ArgumentParser):
    """Ends with the exit code of the other mistakes in a call."""

    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(EXIT_SETTINGS, f"{self.prog}: error: {message}\n")


def run_main(main):
    """Ends the process as main() says: errors of the user's go to stderr, without a traceback. Nothing that
    is printed controls the terminal."""
    with guarded():
        try:
            main()
        except PrepareError as error:
            print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except OSError as error:
            print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
            sys.exit(EXIT_DATA)


def write_files(folder, files):
    """`files`: name -> chunks of bytes. All are written and on the disk before the first gets its
    name, so that a failure leaves the old ones."""
    written = []
    try:
        os.makedirs(folder, exist_ok=True)
        for name, chunks in files.items():
            path = os.path.join(folder, name)
            part = f"{path}.{secrets.token_hex(8)}.part"
            written.append((part, path))
            with open(part, "xb", opener=regular) as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        for part, path in written:
            os.replace(part, path)
    except OSError as error:
        raise WriteError(f"cannot write: {error}", folder) from None
    finally:
        for part, _ in written:
            if os.path.exists(part):
                os.remove(part)
