# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/plot_run.py. Needs nothing beyond Python's own library."""
