# SPDX-License-Identifier: Apache-2.0
"""libddp's programs, libraries, headers and CMake files. Nothing of libddp runs in Python; libddp.export
writes archives that it trains, and libddp.checkpoint reads what it saved."""
