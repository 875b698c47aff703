# SPDX-License-Identifier: Apache-2.0
"""Training steps of two ranks on networks of several speeds (compare_networks): the sides, how many steps of
each are measured, and the figures and tables that follow from the times."""

import contextlib
import dataclasses
import os

from rows import BF16_WIRE, ROWS

WORLD = 2
ONE_GPU = "one GPU"  # in place of a network's name
SOCKETS = dict(
    NCCL_P2P_DISABLE="1",
    NCCL_SHM_DISABLE="1",
    NCCL_SOCKET_IFNAME="lo",
    NCCL_IB_DISABLE="1",
    NCCL_NET="Socket",
    NCCL_NVLS_ENABLE="0",
)
HOOKS = {
    "none": (),
    "bf16_compress": ("comm_hook=bf16_compress",),
    **{f"powersgd{rank}": ("comm_hook=powersgd", f"powersgd_rank={rank}") for rank in (1, 2, 4)},
}
FULL_SPEED_GBIT_S = 20.0  # a guess for the number of steps
# With bucket_cap_mb=auto libddp measures all-reduces of up to 64 MiB, which takes 40 s at 1 Gbit/s.
LEAST_GBIT_S_OF_AUTO = 5.0
ALL_REDUCE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Model:
    row: str  # in rows.py
    parameters: int  # trained ones
    peer_bytes: int  # of a parameter's gradient in PyTorch
    seconds: float  # about what a step takes on one GPU


MODELS = {
    "resnet50": Model("resnet50", 25_557_032, 4, 0.05),
    "gpt2": Model("gpt2", 124_439_808, 4, 0.06),
    "lora": Model("qwen2_7b_lora", 161_480_704, 2, 0.6),
}


@dataclasses.dataclass(frozen=True)
class Side:
    name: str
    program: str  # ours, peer
    settings: tuple
    alone: str  # the side of one GPU that it is compared with
    bytes: int  # of a parameter on the wire; 0: it depends on the shapes


def sides(model, hooks, peers):
    """What is measured on two GPUs. PowerSGD cannot be captured, so libddp's step is eager there."""
    row = ROWS[model.row]
    ours, theirs = (*row.best, *row.reductions), (*row.programs.peers["eager"], *row.peer_settings)
    for hook in hooks:
        own, suffix = HOOKS[hook], "" if hook == "none" else f"_{hook}"
        if hook.startswith("powersgd"):
            yield Side(f"libddp{suffix}", "ours", (*ours, "step=eager", *own), "libddp_eager", 0)
        else:
            yield Side(f"libddp{suffix}", "ours", (*ours, *own), "libddp", 2 if own else 4)
        if hook == "none":
            yield Side("libddp_bf16_wire", "ours", (*ours, *BF16_WIRE), "libddp_bf16_wire", 2)
        num_bytes = 0 if hook.startswith("powersgd") else 2 if own else model.peer_bytes
        if peers and (hook != "bf16_compress" or model.peer_bytes > 2):
            yield Side(f"eager{suffix}", "peer", (*theirs, *own), "eager", num_bytes)


def sides_alone(model, chosen):
    """The sides of one GPU that those of `chosen` are compared with."""
    row = ROWS[model.row]
    own = dict(libddp=(), libddp_bf16_wire=BF16_WIRE, libddp_eager=("step=eager",))
    for name in dict.fromkeys(side.alone for side in chosen):
        if name in own:
            yield Side(name, "ours", (*row.best, *own[name]), name, 0)
        else:
            yield Side(name, "peer", (*row.programs.peers[name], *row.peer_settings, "wrap=false"), name, 0)


def wire_seconds(model, side, gbit_s):
    """About what the reductions of a step take; PowerSGD sends less than a tenth."""
    num_bytes = side.bytes or 0.4
    return model.parameters * num_bytes * 8e-9 * 2 * (WORLD - 1) / WORLD / (gbit_s or FULL_SPEED_GBIT_S)


def for_network(side, gbit_s):
    """The side's settings at this speed."""
    is_slow = gbit_s and gbit_s < LEAST_GBIT_S_OF_AUTO
    return [
        "bucket_cap_mb=25" if is_slow and setting == "bucket_cap_mb=auto" else setting
        for setting in side.settings
    ]


def schedule(step_seconds, settings):
    """(settings, rounds) of a side whose step takes about `step_seconds`. The warm-up includes rebuilt
    buckets, the capture and the start of PowerSGD. Rank 0's weights are not sent: 15 GB of a 7B model take 2
    minutes at 1 Gbit/s."""
    least = 5 if "bucket_cap_mb=auto" in settings else 4
    warmup = min(15, max(least, int(2 / step_seconds)))
    steps = min(30, max(1, int(1.5 / step_seconds)))
    return [
        f"warmup={warmup}",
        f"steps={steps}",
        "host_repeats=0",
        "init_sync=false",
    ], 3 if step_seconds < 1 else 2


@contextlib.contextmanager
def environment(network, gbit_s, shim):
    """Programs that start in this block communicate over loopback, limited to `gbit_s` unless it is 0."""
    changes = {} if network == ONE_GPU else dict(SOCKETS)
    if gbit_s:
        changes.update(LD_PRELOAD=shim, SLOW_SOCKETS_GBIT_S=f"{gbit_s:g}")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def key(*parts):
    return "/".join(map(str, parts))


def figures(record, alone, bytes_per_ms):
    """exposed_ms, reduction_ms and overlap of a side, as far as they are known."""
    about = {}
    if "ms" in record and "ms" in alone:
        about["exposed_ms"] = round(record["ms"] - alone["ms"], 3)
    if record.get("bytes") and bytes_per_ms:
        about["reduction_ms"] = round(record["bytes"] / bytes_per_ms, 3)
    if len(about) == 2:
        about["overlap"] = round(max(0.0, 1 - about["exposed_ms"] / about["reduction_ms"]), 4)
    return about


def cell(record, about):
    if "ms" not in record:
        return "failed" if "error" in record else ""
    exposed = f" / {about['exposed_ms']:,.1f}" if "exposed_ms" in about else ""
    overlap = f" ({about['overlap']:.0%})" if "overlap" in about else ""
    return f"{record['ms']:,.1f}{exposed}{overlap}"


def table(records, name, accumulate, networks):
    """Of one model and accumulation: a row per network, a column per side; empty without a measured side."""

    def is_measured(side):
        return any(key(network, name, accumulate, side.name) in records for network in networks)

    chosen = [side for side in sides(MODELS[name], HOOKS, True) if is_measured(side)]
    if not chosen:
        return []
    alone = {side.alone: records.get(key(ONE_GPU, name, accumulate, side.alone), {}) for side in chosen}
    lines = [
        ["network", *(side.name for side in chosen)],
        [ONE_GPU, *(cell(alone[side.alone], {}) for side in chosen)],
    ]
    for network in networks:
        all_reduce = records.get(key(network, "all_reduce"), {}).get("bytes_per_ms", 0)
        speed = f" (all-reduce {all_reduce * 8e-6:.2f})" if all_reduce else ""
        found = [records.get(key(network, name, accumulate, side.name), {}) for side in chosen]
        lines.append(
            [
                label(network) + speed,
                *(
                    cell(record, figures(record, alone[side.alone], all_reduce))
                    for side, record in zip(chosen, found)
                ),
            ]
        )
    lines.insert(1, ["---"] * len(lines[0]))
    micro_batches = f", {accumulate} micro-batches" if accumulate > 1 else ""
    return [
        f"{ROWS[MODELS[name].row].title}{micro_batches}:",
        "",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def label(network):
    return "sockets, no limit" if network == "full" else f"{network} Gbit/s"


def markdown(records):
    """All tables of what was measured."""
    found = {tuple(name.split("/")) for name in records if name.count("/") == 3}
    networks = sorted(
        {parts[0] for parts in found} - {ONE_GPU}, key=lambda name: -float("inf" if name == "full" else name)
    )
    lines = [
        "Cells: ms of a step on two GPUs / exposed ms (overlap). Exposed: minus the step on one GPU. "
        "Overlap: 1 - exposed /",
        f"time of the reductions alone, by the all-reduce of {ALL_REDUCE_BYTES >> 20} MiB in Gbit/s beside "
        "the network.",
        "",
    ]
    for name in MODELS:
        for accumulate in sorted({int(parts[2]) for parts in found if parts[1] == name}):
            lines += table(records, name, accumulate, networks)
    return "\n".join(lines)
