# SPDX-License-Identifier: Apache-2.0
"""Loss curves of several runs: reading, averaging, comparing and writing them."""

import csv
import glob
import math
import os


def smooth(losses, window):
    """Means of whole windows."""
    return [sum(losses[i : i + window]) / window for i in range(0, len(losses) - window + 1, window)]


def distance(a, b):
    if len(a) != len(b):
        raise ValueError(f"curves of {len(a)} and {len(b)} points cannot be compared")
    return max(abs(x - y) for x, y in zip(a, b))


def allowed(reference, again):
    """The largest allowed distance of a curve from `reference`: twice the distance of `again`, and at least
    what bfloat16 resolves of the first mean loss."""
    return max(2 * distance(reference, again), reference[0] * 2**-8)


def read_losses(folder):
    paths = glob.glob(os.path.join(folder, "**", "steps.csv"), recursive=True)
    if not paths:
        return None
    with open(paths[0], newline="") as f:
        losses = [float(row["loss"]) for row in csv.DictReader(f)]
    for step, loss in enumerate(losses, 1):
        if not math.isfinite(loss):  # max() would overlook it
            raise ValueError(f"{paths[0]}: the loss of step {step} is {loss}")
    return losses


def table(curves, window):
    lines = ["| steps | " + " | ".join(curves) + " |", "|---" * (len(curves) + 1) + "|"]
    points = len(next(iter(curves.values())))
    for i in range(points):
        if i in (0, points - 1) or (i + 1) * window % 20 == 0:
            row = [f"{curve[i]:.4f}" for curve in curves.values()]
            lines.append(f"| {i * window + 1} to {(i + 1) * window} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def write(out, losses, window, verdict):
    """Writes curves.csv and table.md, and prints the table. `verdict` returns a text about the averaged
    curves and whether they are close enough, which is this function's result too."""
    averaged = {side: smooth(values, window) for side, values in losses.items()}
    with open(os.path.join(out, "curves.csv"), "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["step", *losses])
        writer.writerows([i + 1, *row] for i, row in enumerate(zip(*losses.values())))
    text, near = verdict(averaged)
    with open(os.path.join(out, "table.md"), "w") as f:
        f.write(f"{table(averaged, window)}\n\n{text}\n")
    print(table(averaged, window), text, sep="\n\n")
    return near
