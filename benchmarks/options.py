# SPDX-License-Identifier: Apache-2.0
"""What the options of the comparisons share."""

import sys


def usage_error(text):
    print(f"error: {text}", file=sys.stderr)
    sys.exit(64)


def names(text, known, option):
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            usage_error(f"{option}: there is no {name or 'empty name'}; there are {', '.join(known)}")
    return chosen
