# SPDX-License-Identifier: Apache-2.0
"""Command lines of the tools."""

import argparse
import sys

EXIT_MISTAKE = 64  # in the call


class Parser(argparse.ArgumentParser):
    """Shows the tool's docstring as it is written; a mistake in the call ends with EXIT_MISTAKE."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(EXIT_MISTAKE, f"error: {message}\n")
