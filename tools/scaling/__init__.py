# SPDX-License-Identifier: Apache-2.0
"""Scaling studies: their plan, their runs, their numbers, their figures."""
