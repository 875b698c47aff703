# SPDX-License-Identifier: Apache-2.0
"""Metadata of the wheel: it requires exactly the torch it is built with, because LibTorch's C++ interface
changes."""

import importlib.metadata


def dynamic_metadata(settings, project):
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "error: the wheel is built with the torch of the Python that builds it, and this Python has "
            "none; fix: pip install "
            "torch==2.11.0, then pip wheel . --no-build-isolation --no-deps"
        ) from None
    return {"dependencies": [f"torch=={version}"]}
