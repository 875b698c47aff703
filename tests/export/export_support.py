# SPDX-License-Identifier: Apache-2.0
"""The exporter's command for its tests. Skips a test whose packages are missing."""

import contextlib
import io
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[1:1] = [os.path.join(ROOT, "packaging", "python"), os.path.join(ROOT, "tests", "unit", "tools")]
from study_support import need  # noqa: E402

need("torch", "transformers", "safetensors")
from libddp.export.command import main  # noqa: E402


def call(*arguments):
    """Exit code and what is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(list(arguments))
        except SystemExit as end:  # argparse
            code = end.code
    return code, printed.getvalue()
