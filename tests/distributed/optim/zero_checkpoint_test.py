# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ZeRO-1 and Muon: every number of ranks loads the parts that other ranks saved.

usage: zero_checkpoint_test.py reshard|memory|damage|muon LAUNCHER PROGRAM
  reshard  4 ranks save; 2, 1, 3 ranks, 2 unsharded ranks and 4 again load and save: every bit is kept
  memory   a save takes at most a rank's own part of the state and 64 MiB of host memory
  damage   a lost or cut file of parts makes all ranks fall back to the checkpoint before
  muon     as reshard, with optimizer.type=muon: each matrix is in the file of one rank
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import safetensors  # noqa: F401
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

scenario, launcher, program = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "packaging/python"))
import libddp.checkpoint  # noqa: E402

SETTINGS = ["checkpoint.async=false", "context.device=cpu"]


def run(ranks, *words, zero1=True, code=0, rule="adamw"):
    command = [
        launcher,
        "--ranks",
        str(ranks),
        "--timeout",
        "100",
        "--expect-exit",
        f"*:{code}",
        "--verbose",
        "--",
    ]
    rules = [f"optimizer.type={rule}", f"optimizer.zero1={str(zero1).lower()}"]
    words = [program, *SETTINGS, *rules, *words]
    done = subprocess.run(command + words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{ranks} ranks, {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def newest(folder):
    return max(str(path) for path in pathlib.Path(folder).glob("step_*"))


def state_in(folder):
    return libddp.checkpoint.load(newest(folder))


def require_same(one, other, where):
    for name in ("model", "optimizer"):
        if one[name].keys() != other[name].keys():
            sys.exit(f"{where}: {name} has other keys: {sorted(one[name].keys() ^ other[name].keys())}")
        for key, value in one[name].items():
            same = (
                value == other[name][key]
                if not torch.is_tensor(value)
                else same_bits(value, other[name][key])
            )
            if not same:
                sys.exit(f"{where}: {key} of '{name}' differs")


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def reshard(work):
    for half in ("false", "true"):
        folders = [f"{work}/{half}_{i}" for i in range(7)]
        run(4, "train.max_steps=3", f"checkpoint.dir={folders[0]}", f"program.half={half}")
        saved = state_in(folders[0])
        masters = [key for key in saved["optimizer"] if key.endswith(".master")]
        assert len(masters) == (4 if half == "true" else 0), masters
        assert len(list(pathlib.Path(newest(folders[0])).glob("optimizer.rank_*"))) > 1
        hops = [(2, True), (1, True), (3, True), (2, False), (4, True), (1, False)]
        if half == "false":  # without masters fewer kinds of state go the same ways
            hops = [(2, True), (3, True), (1, False)]
        for i, (ranks, zero1) in enumerate(hops):
            source, target = folders[i], folders[i + 1]
            words = [f"checkpoint.dir={source}", f"program.copy_to={target}", f"program.half={half}"]
            run(ranks, *words, zero1=zero1)
            require_same(saved, state_in(target), f"half={half}, {ranks} ranks, zero1={zero1}")
        # The copy of unsharded ranks has whole tensors in one file.
        assert not list(pathlib.Path(newest(folders[len(hops)])).glob("optimizer.rank_*"))


def muon(work):
    for half in ("false", "true"):
        folders = [f"{work}/{half}_{i}" for i in range(6)]
        common = [f"program.half={half}", "program.elements=512"]
        run(3, *common, "train.max_steps=3", f"checkpoint.dir={folders[0]}", zero1=False, rule="muon")
        saved = state_in(folders[0])
        slots = {key.removeprefix("state.") for key in saved["optimizer"] if key.startswith("state.")}
        assert {"large.momentum_buffer", "turned.momentum_buffer", "bias.exp_avg"} <= slots, slots
        assert "large.exp_avg" not in slots and ("large.master" in slots) == (half == "true"), slots
        assert saved["optimizer"]["state.turned.momentum_buffer"].shape == (3, 5, 3, 3)
        assert len(list(pathlib.Path(newest(folders[0])).glob("optimizer.rank_*"))) == 2  # two matrices
        for i, ranks in enumerate((2, 1, 4, 1, 3) if half == "true" else (2, 1, 3)):
            source, target = folders[i], folders[i + 1]
            words = [*common, f"checkpoint.dir={source}", f"program.copy_to={target}"]
            run(ranks, *words, zero1=False, rule="muon")
            require_same(saved, state_in(target), f"half={half}, {ranks} ranks")
            parts = list(pathlib.Path(newest(target)).glob("optimizer.rank_*"))
            assert len(parts) == (0 if ranks == 1 else 2), parts


def memory(work):
    elements = 24 << 20
    text = run(4, "train.max_steps=1", f"checkpoint.dir={work}/run", f"program.elements={elements}")
    mib = {
        int(rank): float(used) for rank, used in re.findall(r"rank (\d): the save took ([\d.]+) MiB", text)
    }
    slots = 2 * elements * 4 / 2**20
    own, weights = slots / 4, elements * 4 / 2**20
    print(
        f"state {slots:.0f} MiB, a part {own:.0f} MiB, rank 0's weights {weights:.0f} MiB, saves took {mib}"
    )
    assert sorted(mib) == [0, 1, 2, 3], text
    for rank, used in mib.items():
        assert used <= own + 64 + (weights if rank == 0 else 0), f"rank {rank} took {used} MiB"


def damage(work):
    folder = f"{work}/run"
    run(3, "train.max_steps=2", f"checkpoint.dir={folder}")
    first = state_in(folder)
    run(3, "train.max_steps=4", f"checkpoint.dir={folder}")
    newer = newest(folder)
    part = f"{newer}/optimizer.rank_00001.safetensors"
    content = pathlib.Path(part).read_bytes()
    cut_start = content.replace(b'\\"begin\\":0', b'\\"begin\\":9', 1)
    assert cut_start != content
    for what in (None, content[: len(content) // 2], cut_start):
        if what is None:
            os.remove(part)
        else:
            pathlib.Path(part).write_bytes(what)
        text = run(2, f"checkpoint.dir={folder}", f"program.copy_to={work}/copy_{what and len(what)}")
        assert f"skipped the checkpoint {newer}" in text and "optimizer.rank_00001.safetensors" in text, text
        require_same(first, state_in(f"{work}/copy_{what and len(what)}"), "after damage")


with tempfile.TemporaryDirectory() as work:
    {"reshard": reshard, "memory": memory, "damage": damage, "muon": muon}[scenario](work)
