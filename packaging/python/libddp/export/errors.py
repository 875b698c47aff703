# SPDX-License-Identifier: Apache-2.0
"""Errors of an export, with the exit codes of libddp's programs."""

LAST_LINES = 12  # of Python's error, which can have pages
FOR_DEVELOPERS = ("TORCH_LOGS", "TORCHDYNAMO_", "draft_export()", "docs.google.com", "run with")  # of PyTorch


class ExportError(Exception):
    exit_code = 70


class Mistake(ExportError, ValueError):
    """An argument that cannot be used."""

    exit_code = 64


class DoesNotExport(ExportError, RuntimeError):
    """torch.export refuses the model, or its program computes something else."""

    exit_code = 65


class CannotWrite(ExportError, OSError):
    exit_code = 73


def last_lines(error):
    """Python's own words, shortened."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    first, rest = lines[:1], lines[1:]
    for word in FOR_DEVELOPERS:
        rest = [line for line in rest if word not in line]
    lines = first + rest
    kept = lines if len(lines) <= LAST_LINES else [lines[0], "…", *lines[1 - LAST_LINES :]]
    return f"{type(error).__name__}: " + "\n  ".join(kept or ["(no message)"])
