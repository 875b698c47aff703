# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch programs that libddp is compared with share: settings, launch, memory, a captured step,
and taking turns round by round (interleaved.py)."""

import contextlib
import os
import statistics
import sys
import time
import types

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

# What every program that takes turns has.
PROTOCOL_DEFAULTS = dict(
    steps=20,
    warmup=15,
    lead_in=0,
    host_repeats=5,
    init_sync=True,
    rounds=5,
    device="auto",
    release_memory=False,
    gate="",
    name="pytorch",
    profile="",
    profile_steps=5,
)


def parse(arguments, defaults):
    """key=value arguments over `defaults`, each of its default's type; an unknown key ends the program."""
    options = dict(PROTOCOL_DEFAULTS, **defaults)
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in options:
            sys.exit(f"unknown setting {key}; there are {', '.join(options)}")
        kind = type(options[key])
        options[key] = text.lower() in ("1", "true", "on") if kind is bool else kind(text)
    return types.SimpleNamespace(**options)


def setup(device_name="auto"):
    """(device, world size); with a launcher's environment there is a process group, at world 1 too."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and device_name != "cpu"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device, world


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def close():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


HOOKS = ("none", "bf16_compress", "powersgd")


def wrap(o, model, device, **options):
    """`model` in DistributedDataParallel with the hook that `comm_hook` names; without a process group, or
    with wrap=false, the model itself. PowerSGD begins in the third step, the earliest that PyTorch
    accepts."""
    if not (o.wrap and dist.is_initialized()):
        return model
    if o.comm_hook not in HOOKS:
        sys.exit(f"comm_hook={o.comm_hook}, there are {', '.join(HOOKS)}")
    ids = [device.index] if device.type == "cuda" else None
    model = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=ids, bucket_cap_mb=o.bucket_cap_mb, init_sync=o.init_sync, **options
    )
    if o.comm_hook == "bf16_compress":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif o.comm_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=o.powersgd_rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def no_sync(o, model, index):
    """The context of micro-batch `index` of `accumulate`: gradients are reduced in the last one."""
    waits = o.wrap and dist.is_initialized() and index + 1 < o.accumulate
    return model.no_sync() if waits else contextlib.nullcontext()


def autocast(dtype, device):
    """torch.autocast for bf16 or fp16; off for any other name."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    return torch.autocast(device.type, dtype=kind or torch.bfloat16, enabled=kind is not None)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def used_mib(device):
    """Device memory in use by anyone, as cudaMemGetInfo tells it."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


class Gate:
    """Takes turns with other programs through files (interleaved.py); without `gate` it never waits."""

    def __init__(self, o):
        self.prefix = os.path.join(o.gate, o.name) if o.gate else None

    def wait(self, what):
        while self.prefix and not os.path.exists(f"{self.prefix}.{what}"):
            if not os.path.exists(os.path.dirname(self.prefix)):
                sys.exit(f"{os.path.dirname(self.prefix)} is gone: nobody waits for this program")
            time.sleep(0.001)
        if self.prefix and dist.is_initialized():
            dist.barrier()

    def answer(self, what, value):
        """From rank 0 when all ranks are off their devices; written aside and renamed, so that it is read
        whole."""
        if self.prefix and dist.is_initialized():
            dist.barrier()
        if not self.prefix or not is_main():
            return
        path = f"{self.prefix}.{what}"
        with open(path + ".part", "w") as f:
            f.write(repr(value))
        os.rename(path + ".part", path)


def release(o, device):
    """Cached device memory goes back, so that both programs fit beside each other."""
    if o.release_memory and device.type == "cuda":
        torch.cuda.empty_cache()


class CapturedStep:
    """`step` captured whole (forward, backward, reductions, optimizer) in one CUDA graph after `eager_steps`
    eager ones (DDP wants 11), then replayed; all on the current stream, which must be a side stream where the
    model was built too. `step` leaves its gradients undefined before it computes new ones."""

    def __init__(self, step, eager_steps=11):
        self.step, self.eager_steps, self.graph = step, eager_steps, None

    def __call__(self):
        if self.eager_steps > 0:
            self.eager_steps -= 1
            self.step()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                self.step()
        self.graph.replay()


def host_work(device, step, is_graph=False, repeats=5):
    """(wall ms, CPU us) in which the host issues one step into an empty queue, medians; a step that is one
    launch: behind another one, as in a run."""
    if repeats == 0:
        return 0.0, 0.0
    wall, cpu = [], []
    for _ in range(repeats):
        synchronize(device)
        if is_graph:
            step()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        step()
        wall.append((time.perf_counter() - begin) * 1000)
        cpu.append((time.process_time() - cpu_begin) * 1e6)
    synchronize(device)
    return statistics.median(wall), statistics.median(cpu)


def write_profile(path, device, step, steps):
    """A Chrome trace of `steps` steps' device work by rank 0: what step_profile.py reads."""
    activities = [
        torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    ]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        synchronize(device)
    if is_main():
        profile.export_chrome_trace(path)


def measure_rounds(o, gate, device, step):
    """(ms: the median of o.rounds means over o.steps steps, ms of each round, peak MiB after the warm-up)."""
    for _ in range(o.warmup):
        step()
    synchronize(device)
    o.host_ms, o.host_us = host_work(device, step, getattr(o, "step", "").endswith("graph"), o.host_repeats)
    peak = used_mib(device)
    release(o, device)
    gate.answer("ready", peak)
    times = []
    for index in range(o.rounds):
        gate.wait(f"go{index}")
        for _ in range(o.lead_in):
            step()
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(o.steps):
            step()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1000 / o.steps)
        release(o, device)
        gate.answer(f"done{index}", times[-1])
    if o.profile:
        gate.wait("profile")
        write_profile(o.profile, device, step, o.profile_steps)
        gate.answer("profiled", o.profile_steps)
    return statistics.median(times), times, peak
