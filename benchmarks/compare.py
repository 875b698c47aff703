#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libddp against PyTorch in one call: both programs run at once on the same GPUs and take turns, round
by round, so that clocks, temperature and neighbours are the same for both. While one measures, the other
sleeps on the host.

usage: compare.py BENCH OUT_DIR CASE…     BENCH = a built bench_resnet or bench_lm
       CASE = model:size:global_batch:world[,key=value…]     size: image size, or tokens of a sequence
       Further settings go to both programs, or to one: libddp.key=value, pytorch.key=value

       compare.py build/benchmarks/bench_resnet OUT resnet50:224:256:1 resnet18:32:512:2,stem=cifar
       compare.py build/benchmarks/bench_lm OUT gpt2:1024:16:1,pytorch.compile=true,pytorch.vocab_size=50304

Prints one line a case and writes OUT_DIR/compare.json, with what each program said of itself. ms is the
median over ROUNDS rounds; peak_mib is memory of the first device as cudaMemGetInfo tells it, less what was in
use before the program started. Where both programs do not fit beside each other, release_memory=true,lead_in=1
makes them give memory back after each round and take it again in a step that is not timed. Without a GPU both
run on the CPU, several ranks of libddp under mpirun. Environment: ROUNDS (5), READY_TIMEOUT (240 s until the
warm-up is done), ROUND_TIMEOUT (120 s).
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch, which takes its time
    print(__doc__.strip())
    sys.exit(0)
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
READY_TIMEOUT = float(os.environ.get("READY_TIMEOUT", "240"))
ROUND_TIMEOUT = float(os.environ.get("ROUND_TIMEOUT", "120"))
# What stands behind a benchmark's name: the other side, the setting that `size` is, and what a step handles.
BENCHMARKS = {
    "bench_resnet": dict(peer="pytorch_resnet.py", size="image_size", unit="img_s", per_sample=lambda size: 1),
    "bench_lm": dict(peer="pytorch_lm.py", size="seq_len", unit="tokens_s", per_sample=lambda size: size),
}


def device_memory_used():
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**20


class Program:
    """One side: started, then asked for rounds one by one through files in `gate`."""

    def __init__(self, name, command, world, gate, log):
        self.name, self.gate = name, gate
        if command[0].endswith(".py"):
            # Also at world 1: without a launch there would be no process group, and no DDP, in PyTorch.
            launch = ["torchrun", "--standalone", f"--nproc-per-node={world}"]
        elif torch.cuda.is_available() or world == 1:
            launch = ["torchrun", "--standalone", f"--nproc-per-node={world}", "--no-python"]
        else:
            launch = ["mpirun", "-n", str(world)]
        command = launch + command + [f"gate={gate}", f"name={name}", f"rounds={ROUNDS}"]
        self.log = open(log, "w")
        environment = dict(os.environ, NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)

    def tell(self, what):
        open(os.path.join(self.gate, f"{self.name}.{what}"), "w").close()

    def wait_for(self, suffix, timeout):
        path = os.path.join(self.gate, f"{self.name}.{suffix}")
        end = time.monotonic() + timeout
        while not os.path.exists(path):
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: see {self.log.name}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: no {suffix} within {timeout:g} s: see {self.log.name}")
            time.sleep(0.002)
        with open(path) as f:
            return float(f.read())

    def round(self, index):
        self.tell(f"go{index}")
        return self.wait_for(f"done{index}", ROUND_TIMEOUT)

    def finish(self):
        """What the program said of itself, after its last round."""
        self.process.wait(60)
        with open(self.log.name) as f:
            lines = [line for line in f if line.startswith("{")]
        if self.process.returncode != 0 or not lines:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: see {self.log.name}")
        return json.loads(lines[-1])

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def split_settings(settings):
    """Settings of a case by program: `libddp.` and `pytorch.` in front say whose."""
    mine = dict(libddp=[], pytorch=[])
    for setting in settings:
        owner, dot, rest = setting.partition(".")
        for name in mine:
            if not (dot and owner in mine):
                mine[name].append(setting)
            elif name == owner:
                mine[name].append(rest)
    return mine


def measure(programs):
    """Times by program and memory by program; leaves both programs finished."""
    memory, times = {}, {p.name: [] for p in programs}
    for program in programs:
        before = device_memory_used()  # nobody touches the device before `start`
        program.tell("start")
        memory[program.name] = program.wait_for("ready", READY_TIMEOUT) - before
    for index in range(ROUNDS):
        for program in programs if index % 2 == 0 else reversed(programs):
            times[program.name].append(program.round(index))
    return times, memory, {p.name: p.finish() for p in programs}


def compare(bench, out, case):
    benchmark = BENCHMARKS[os.path.basename(bench)]
    head, *extra = case.split(",")
    model, size, global_batch, world = head.split(":")
    size, global_batch, world = int(size), int(global_batch), int(world)
    if global_batch % world:
        raise RuntimeError(f"global batch {global_batch} is no multiple of {world} ranks")
    common = [f"model={model}", f"{benchmark['size']}={size}", f"batch_size={global_batch // world}"]
    settings = split_settings(extra)
    tag = case.replace(":", "_").replace(",", "_").replace("=", "-")
    gate = tempfile.mkdtemp()
    programs = []
    try:
        for name, command in (("libddp", bench), ("pytorch", os.path.join(HERE, benchmark["peer"]))):
            log = os.path.join(out, f"{tag}.{name}.log")
            programs.append(Program(name, [command] + common + settings[name], world, gate, log))
        times, memory, said = measure(programs)
    finally:
        for program in programs:
            program.stop()
        shutil.rmtree(gate, ignore_errors=True)
    result = dict(case=case, world=world, unit=benchmark["unit"])
    handled = global_batch * benchmark["per_sample"](size)
    for name in times:
        ms = statistics.median(times[name])
        result[name] = {"ms": round(ms, 4), benchmark["unit"]: round(handled / ms * 1000, 1),
                        "rounds_ms": times[name], "peak_mib": round(memory[name]), "said": said[name]}
    result["speedup"] = round(result["pytorch"]["ms"] / result["libddp"]["ms"], 4)
    return result


def main():
    if len(sys.argv) < 4 or os.path.basename(sys.argv[1]) not in BENCHMARKS:
        sys.exit(__doc__)
    bench, out, cases = os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.makedirs(out, exist_ok=True)
    unit = BENCHMARKS[os.path.basename(bench)]["unit"].replace("_", "/")
    results, failed = [], False
    width = max(len(case) for case in cases)
    print(f"{'case':{width}} {'libddp':>10} {'PyTorch':>10} {'ratio':>7}   {unit:>9} {'PyTorch':>9}   peak MiB")
    for case in cases:
        try:
            r = compare(bench, out, case)
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            print(f"{case:{width}} FAILED: {error}", flush=True)
            failed = True
            continue
        results.append(r)
        ours, theirs = r["libddp"], r["pytorch"]
        print(f"{case:{width}} {ours['ms']:8.3f}ms {theirs['ms']:8.3f}ms {r['speedup']:7.3f}   {ours[r['unit']]:9.1f} "
              f"{theirs[r['unit']]:9.1f}   {ours['peak_mib']} / {theirs['peak_mib']}", flush=True)
        with open(os.path.join(out, "compare.json"), "w") as f:  # after each case: a call may be cut short
            json.dump(results, f, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
