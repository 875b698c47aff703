# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/ddp_top.py: gpus and folder read, view draws, screen shows. Needs nothing beyond
Python's own library."""
