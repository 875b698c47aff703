# SPDX-License-Identifier: Apache-2.0
"""Several programs that measure training steps on the same GPUs, round by round in turn, so that clocks,
temperature and neighbours are the same for all: while one measures, the others sleep on the host.

A program takes key=value settings; among them are `gate` (a folder), `name` and `rounds`. Before it touches a
device it waits for GATE/NAME.start; it answers GATE/NAME.ready with its MiB of device memory when its warm-up
is done, waits for GATE/NAME.go0, answers GATE/NAME.done0 with the milliseconds of a step, and so on. With the
setting `profile` it then waits for GATE/NAME.profile, writes that file and answers GATE/NAME.profiled. Its
last line on the terminal that begins with { is what it says of itself.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
READY_TIMEOUT = float(os.environ.get("READY_TIMEOUT", "240"))
ROUND_TIMEOUT = float(os.environ.get("ROUND_TIMEOUT", "120"))
PROFILE_STEPS = 5
# What ends a measurement but not the measurements that follow it.
ERRORS = (RuntimeError, ValueError, LookupError, OSError, tarfile.TarError, subprocess.TimeoutExpired)


def device_memory_used():
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**20


def launcher(program, world):
    """What starts `program` on `world` ranks."""
    is_script = program.endswith(".py")
    if is_script or torch.cuda.is_available() or world == 1:
        # Also at world 1: without a launch there would be no process group, and no DDP, in PyTorch.
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        return launch if is_script else launch + ["--no-python"]
    return ["mpirun", "-n", str(world)]


def failure(error):
    """As `error` of a side."""
    text = str(error)
    return dict(error=f"{type(error).__name__}: {text}" if isinstance(error, LookupError) else text)


def end(process):
    """Asks first: a launcher takes its ranks along, one that is killed leaves them on the GPUs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)  # torchrun gives its ranks 30 s
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Program:
    """One side: started, then asked for rounds one by one through files in `gate`."""

    def __init__(self, name, command, world, gate, log, rounds=ROUNDS, profile=None):
        self.name, self.gate, self.profile = name, gate, profile
        command = launcher(command[0], world) + command + [f"gate={gate}", f"name={name}", f"rounds={rounds}"]
        command += [f"profile={profile}", f"profile_steps={PROFILE_STEPS}"] if profile else []
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
        end(self.process)
        self.log.close()


def split_settings(settings, names):
    """Settings by program: one that begins with `NAME.` goes to that program alone, any other to all."""
    mine = {name: [] for name in names}
    for setting in settings:
        owner, dot, rest = setting.partition(".")
        for name in mine:
            if not (dot and owner in mine):
                mine[name].append(setting)
            elif name == owner:
                mine[name].append(rest)
    return mine


def start(program):
    """The program's memory once it is warm."""
    before = device_memory_used()  # nobody touches the device before `start`
    program.tell("start")
    peak = program.wait_for("ready", READY_TIMEOUT) - before
    return dict(peak_mib=round(peak), rounds_ms=[], windows=[], trace=program.profile)


def one_round(program, index, result):
    begin = time.monotonic()
    result["rounds_ms"].append(program.round(index))
    result["windows"].append((begin, time.monotonic()))


def write_profile(program):
    if program.profile:
        program.tell("profile")
        program.wait_for("profiled", ROUND_TIMEOUT)


def finish(program, result):
    result["said"] = program.finish()
    result["ms"] = round(statistics.median(result["rounds_ms"]), 4)


def measure(programs, rounds, keep_going):
    """By program's name: memory, times of the rounds and when they were, and what was said. With `keep_going`
    a program that fails is left out of what follows, and has `error` in its place."""
    results = {}

    def each(action, programs):
        for program in programs:
            result = results.get(program.name, {})
            if "error" in result:
                continue
            try:
                action(program, result)
            except ERRORS as error:
                if not keep_going:
                    raise
                program.stop()
                results[program.name] = failure(error)

    each(lambda program, _: results.update({program.name: start(program)}), programs)
    for index in range(rounds):
        each(
            lambda program, result, index=index: one_round(program, index, result),
            programs if index % 2 == 0 else programs[::-1],
        )
    each(lambda program, _: write_profile(program), programs)
    each(finish, programs)
    return results


def run(commands, world, log_prefix, rounds=ROUNDS, profile=False, keep_going=False):
    """Measures the programs of `commands` (name: command line) side by side. Their logs are
    LOG_PREFIX.NAME.log, with `profile` their traces LOG_PREFIX.NAME.trace.json."""
    gate = tempfile.mkdtemp()
    programs = []
    asked_to_end = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`
    try:
        for name, command in commands.items():
            prefix = os.path.abspath(f"{log_prefix}.{name}")
            trace = f"{prefix}.trace.json" if profile else None
            programs.append(Program(name, command, world, gate, f"{prefix}.log", rounds, trace))
        return measure(programs, rounds, keep_going)
    finally:
        for program in programs:
            program.stop()
        shutil.rmtree(gate, ignore_errors=True)
        signal.signal(signal.SIGTERM, asked_to_end)
