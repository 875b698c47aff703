# SPDX-License-Identifier: Apache-2.0
"""python -m libddp.export"""

import sys

from .command import main

sys.exit(main())
