#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command of packaging/python/libddp/export, from a checkout: export_model.py --help lists the
options."""

import os
import sys

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "packaging", "python")
)
from libddp.export.command import main

if __name__ == "__main__":
    sys.exit(main())
