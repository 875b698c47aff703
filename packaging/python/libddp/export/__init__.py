# SPDX-License-Identifier: Apache-2.0
"""Exports a PyTorch module into an archive that C++ trains (docs/exported_models.md).

    from libddp.export import export
    print(export(model, (images,), path="net.pt2"))

The archive holds the program of training as "model", the program of evaluation as "eval", and the weights
once. C++ reads it with ddp::ExportedModule. torch.export.load(path) gives the program of training, and
torch.export.pt2_archive._package.load_pt2(path).exported_programs["eval"] the program of evaluation.
"""

from .errors import CannotWrite, DoesNotExport, Mistake

__all__ = ["CannotWrite", "DoesNotExport", "Mistake", "export"]


def __getattr__(name):
    if name == "export":  # needs torch
        from .program import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
