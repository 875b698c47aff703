#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libddp against PyTorch in one call: both programs run at once on the same GPUs and take turns, round
by round, so that clocks, temperature and neighbours are the same for both. While one measures, the other
sleeps on the host.

usage: compare_resnet.py BENCH_RESNET OUT_DIR CASE…     CASE = model:image_size:global_batch:world
       with `stem=cifar`-like settings appended after a comma: resnet18:32:512:1,stem=cifar

Prints one line a case and writes OUT_DIR/compare.json. ms is the median over ROUNDS rounds; peak_mib is
device memory as cudaMemGetInfo tells it, less what was in use before the program started.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
READY_TIMEOUT = 150
ROUND_TIMEOUT = 60


def device_memory_used():
    import torch
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**20


class Program:
    """One side: started, then asked for rounds one by one through files in `gate`."""

    def __init__(self, name, command, world, gate, log):
        self.name, self.gate = name, gate
        # Also at world 1: without a launch there would be no process group, and no DDP, in PyTorch.
        command = ["torchrun", "--standalone", f"--nproc-per-node={world}"] + (
            command if command[0].endswith(".py") else ["--no-python"] + command)
        command += [f"gate={gate}", f"name={name}", f"rounds={ROUNDS}"]
        self.log = open(log, "w")
        environment = dict(os.environ, NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)

    def wait_for(self, suffix, timeout):
        path = os.path.join(self.gate, f"{self.name}.{suffix}")
        end = time.monotonic() + timeout
        while not os.path.exists(path):
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: see {self.log.name}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: no {suffix} within {timeout} s: see {self.log.name}")
            time.sleep(0.002)
        with open(path) as f:
            return float(f.read())

    def round(self, index):
        open(os.path.join(self.gate, f"{self.name}.go{index}"), "w").close()
        return self.wait_for(f"done{index}", ROUND_TIMEOUT)

    def stop(self):
        if self.process.poll() is None:
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.terminate()
                self.process.wait(20)
        self.log.close()


def compare(bench, out, case):
    head, *extra = case.split(",")
    model, image_size, global_batch, world = head.split(":")
    world = int(world)
    settings = [f"model={model}", f"image_size={image_size}", f"batch_size={int(global_batch) // world}"] + extra
    tag = case.replace(":", "_").replace(",", "_").replace("=", "-")
    gate = tempfile.mkdtemp()
    programs = []
    try:
        memory = {}
        before = device_memory_used()
        for name, command in (("libddp", [bench]), ("pytorch", [os.path.join(HERE, "pytorch_resnet.py")])):
            program = Program(name, command + settings, world, gate, os.path.join(out, f"{tag}.{name}.log"))
            programs.append(program)
            used = program.wait_for("ready", READY_TIMEOUT)
            memory[name] = used - before
            before = used
        times = {p.name: [] for p in programs}
        for index in range(ROUNDS):
            for program in programs if index % 2 == 0 else reversed(programs):
                times[program.name].append(program.round(index))
    finally:
        for program in programs:
            program.stop()
        shutil.rmtree(gate, ignore_errors=True)
    result = dict(case=case, world=world)
    for name in times:
        ms = statistics.median(times[name])
        result[name] = dict(ms=round(ms, 4), img_s=round(int(global_batch) / ms * 1000, 1), rounds_ms=times[name],
                            peak_mib=round(memory[name]))
    result["speedup"] = round(result["pytorch"]["ms"] / result["libddp"]["ms"], 4)
    return result


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    bench, out, cases = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.makedirs(out, exist_ok=True)
    results, failed = [], False
    print(f"{'case':34} {'libddp':>10} {'PyTorch':>10} {'ratio':>7}   {'img/s':>9} {'PyTorch':>9}   peak MiB")
    for case in cases:
        try:
            r = compare(bench, out, case)
        except RuntimeError as error:
            print(f"{case:34} FAILED: {error}", flush=True)
            failed = True
            continue
        results.append(r)
        ours, theirs = r["libddp"], r["pytorch"]
        print(f"{case:34} {ours['ms']:8.3f}ms {theirs['ms']:8.3f}ms {r['speedup']:7.3f}   {ours['img_s']:9.1f} "
              f"{theirs['img_s']:9.1f}   {ours['peak_mib']} / {theirs['peak_mib']}", flush=True)
    with open(os.path.join(out, "compare.json"), "w") as f:
        json.dump(results, f, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
