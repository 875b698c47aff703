# SPDX-License-Identifier: Apache-2.0
"""The comparison on slow networks: its sides, the number of steps, the figures and tables, a call that goes
on where an earlier one stopped, and the rate of slow_sockets.c. No program of a benchmark runs here."""

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT, TURNS, need

need("torch")
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import networks  # noqa: E402

TOOL = os.path.join(ROOT, "benchmarks", "compare_networks")


def side(model, name):
    return next(
        side for side in networks.sides(networks.MODELS[model], networks.HOOKS, True) if side.name == name
    )


class Sides(unittest.TestCase):
    def test_a_side_knows_its_settings_its_bytes_and_its_one_gpu(self):
        plain = side("resnet50", "libddp")
        self.assertEqual(
            plain.settings, ("step=graph", "param_dtype=bf16", "bucket_cap_mb=auto", "nccl_max_ctas=24")
        )
        self.assertEqual(
            (plain.bytes, side("resnet50", "libddp_bf16_wire").bytes, side("lora", "eager").bytes), (4, 2, 2)
        )
        low_rank = side("gpt2", "libddp_powersgd2")
        self.assertEqual(low_rank.settings[-3:], ("step=eager", "comm_hook=powersgd", "powersgd_rank=2"))
        self.assertEqual((low_rank.alone, low_rank.bytes), ("libddp_eager", 0))
        self.assertEqual(
            side("gpt2", "eager_bf16_compress").settings, ("vocab_size=50304", "comm_hook=bf16_compress")
        )
        with self.assertRaises(StopIteration):  # PyTorch's gradients have 16 bits there anyway
            side("lora", "eager_bf16_compress")

    def test_each_side_of_one_gpu_is_measured_once(self):
        model = networks.MODELS["resnet50"]
        alone = list(networks.sides_alone(model, list(networks.sides(model, networks.HOOKS, True))))
        self.assertEqual(
            [side.name for side in alone], ["libddp", "libddp_bf16_wire", "eager", "libddp_eager"]
        )
        self.assertEqual(alone[2].settings, ("step=eager", "wrap=false"))
        self.assertEqual(alone[3].settings, ("step=graph", "param_dtype=bf16", "step=eager"))
        few = list(networks.sides(model, ["bf16_compress"], False))
        self.assertEqual([side.name for side in networks.sides_alone(model, few)], ["libddp"])

    def test_steps_follow_from_the_network(self):
        gpt2 = networks.MODELS["gpt2"]
        self.assertAlmostEqual(
            networks.wire_seconds(gpt2, side("gpt2", "libddp"), 1), 124_439_808 * 4 * 8 / 1e9
        )
        self.assertAlmostEqual(
            networks.wire_seconds(gpt2, side("gpt2", "libddp_bf16_wire"), 10), 124_439_808 * 2 * 8 / 1e10
        )
        self.assertEqual(
            networks.schedule(4.0, ["bucket_cap_mb=100"]),
            (["warmup=4", "steps=1", "host_repeats=0", "init_sync=false"], 2),
        )
        settings, rounds = networks.schedule(0.05, ["bucket_cap_mb=auto"])
        self.assertEqual((settings[:2], rounds), (["warmup=15", "steps=30"], 3))
        self.assertEqual(networks.schedule(1.0, ["bucket_cap_mb=auto"])[0][0], "warmup=5")

    def test_auto_buckets_are_not_measured_on_the_slowest_network(self):
        plain = side("resnet50", "libddp")
        for gbit_s, cap in ((1.0, "25"), (10.0, "auto"), (0.0, "auto")):
            self.assertEqual(networks.for_network(plain, gbit_s)[2], f"bucket_cap_mb={cap}")

    def test_the_environment_ends_with_the_block(self):
        before = dict(os.environ)
        with networks.environment("10", 10.0, "shim.so"):
            self.assertEqual(
                [os.environ[name] for name in ("NCCL_P2P_DISABLE", "LD_PRELOAD", "SLOW_SOCKETS_GBIT_S")],
                ["1", "shim.so", "10"],
            )
        with networks.environment("full", 0.0, "shim.so"):
            self.assertEqual(
                (os.environ["NCCL_SHM_DISABLE"], os.environ.get("LD_PRELOAD")),
                ("1", before.get("LD_PRELOAD")),
            )
        with networks.environment(networks.ONE_GPU, 0.0, "shim.so"):
            self.assertEqual(dict(os.environ), before)
        self.assertEqual(dict(os.environ), before)


class Figures(unittest.TestCase):
    def test_exposed_time_and_overlap(self):
        self.assertEqual(
            networks.figures(dict(ms=130.0, bytes=100e6), dict(ms=90.0), 1.25e6),
            dict(exposed_ms=40.0, reduction_ms=80.0, overlap=0.5),
        )
        self.assertEqual(networks.figures(dict(ms=190.0, bytes=100e6), dict(ms=90.0), 1.25e6)["overlap"], 0.0)
        self.assertEqual(
            networks.figures(dict(ms=130.0, bytes=0), dict(ms=90.0), 1.25e6), dict(exposed_ms=40.0)
        )
        self.assertEqual(networks.figures(dict(error="e"), dict(ms=90.0), 0), {})

    def test_tables_have_networks_as_rows_from_fast_to_slow(self):
        records = {"10/all_reduce": dict(bytes_per_ms=1.25e6), "machines": []}
        for network, ms in (("1", 5000.0), ("full", 140.0), ("10", 130.0), ("one GPU", 90.0)):
            records[f"{network}/gpt2/4/libddp"] = dict(ms=ms, bytes=100_000_000)
        records["1/gpt2/4/eager"] = dict(error="out of memory")
        self.assertEqual(
            networks.markdown(records).splitlines()[3:],
            [
                "GPT-2 124M, 16 x 1,024 tokens, 4 micro-batches:",
                "",
                "| network | libddp | eager |",
                "| --- | --- | --- |",
                "| one GPU | 90.0 |  |",
                "| sockets, no limit | 140.0 / 50.0 |  |",
                "| 10 Gbit/s (all-reduce 10.00) | 130.0 / 40.0 (50%) |  |",
                "| 1 Gbit/s | 5,000.0 / 4,910.0 | failed |",
            ],
        )


PROGRAM = (
    TURNS
    + r"""if os.environ.get("SLOW_SOCKETS_GBIT_S") == o.get("fails"):
    sys.exit(3)
wait("start")
answer("ready", 1.0)
for index in range(int(o["rounds"])):
    wait(f"go{index}")
    answer(f"done{index}", 7.5)
print(json.dumps({}))
"""
)


@unittest.skipUnless(shutil.which("cc"), "there is no C compiler")
class Calls(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        os.makedirs(os.path.join(self.folder.name, "build", "benchmarks"))
        for name, text in (
            ("build/benchmarks/bench_lm", PROGRAM.replace("{python}", sys.executable)),
            ("mpirun", '#!/bin/sh\nshift 2\nexec "$@"\n'),
        ):
            path = os.path.join(self.folder.name, name)
            with open(path, "w") as f:
                f.write(text)
            os.chmod(path, 0o755)
        self.out = os.path.join(self.folder.name, "out")

    def call(self, *arguments):
        environment = dict(
            os.environ, CUDA_VISIBLE_DEVICES="", PATH=self.folder.name + os.pathsep + os.environ["PATH"]
        )
        return subprocess.run(
            [
                sys.executable,
                TOOL,
                os.path.join(self.folder.name, "build"),
                self.out,
                "--models",
                "gpt2",
                "--accumulate",
                "1",
                "--hooks",
                "bf16_compress",
                "--peers",
                "none",
                "--set",
                "device=cpu",
                *arguments,
            ],
            capture_output=True,
            text=True,
            env=environment,
        )

    def records(self):
        with open(os.path.join(self.out, "networks.json")) as f:
            return json.load(f)

    def test_a_later_call_measures_what_is_missing_or_failed(self):
        first = self.call("--networks", "full,10", "--set", "fails=10")
        self.assertEqual(first.returncode, 1, first.stdout + first.stderr)
        begun = self.records()
        self.assertEqual(begun["one GPU/gpt2/1/libddp"]["ms"], 7.5)
        self.assertIn("ended with 3", begun["10/gpt2/1/libddp_bf16_compress"]["error"])
        none = self.call("--networks", "full,10", "--budget", "0")
        self.assertIn("1 measurements are left", none.stdout, none.stderr)
        second = self.call("--networks", "full,10")
        self.assertEqual(second.returncode, 0, second.stdout + second.stderr)
        self.assertEqual(len(second.stdout.splitlines()), 1, second.stdout)
        ended = self.records()
        self.assertEqual(ended["10/gpt2/1/libddp_bf16_compress"]["ms"], 7.5)
        self.assertEqual(ended["full/gpt2/1/libddp_bf16_compress"], begun["full/gpt2/1/libddp_bf16_compress"])
        with open(os.path.join(self.out, "networks.md")) as f:
            self.assertIn("| 10 Gbit/s | 7.5 / 0.0 |", f.read())

    def test_mistakes_in_the_call_are_named(self):
        for arguments, said in (
            (["--networks", "fast"], "fast is neither full nor a number"),
            (["--networks", "0"], "0 is neither"),
            (["--models", "bert"], "there is no bert"),
            (["--hooks", "powersgd3"], "there is no powersgd3"),
            (["--peers", "compile"], "there is no compile"),
            (["--accumulate", "0"], "numbers above 0"),
        ):
            done = self.call(*arguments)
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertIn(said, done.stderr)


SENDER = r"""
import random, socket, sys, time
data, left = memoryview(random.Random(1).randbytes(1 << 20)), int(sys.argv[2])
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"small")
flags = socket.MSG_DONTWAIT if sys.argv[3] == "polls" else 0
begin = time.perf_counter()
while left > 0:
    try:
        left -= connection.send(data[-left % len(data):][:left], flags)
    except BlockingIOError:
        pass
print(time.perf_counter() - begin)
"""


@unittest.skipUnless(shutil.which("cc"), "there is no C compiler")
class SlowSockets(unittest.TestCase):
    def test_a_process_sends_at_its_rate_and_all_bytes_arrive(self):
        num_bytes = 8 << 20
        whole = b"small" + random.Random(1).randbytes(1 << 20) * 8
        with tempfile.TemporaryDirectory() as folder:
            shim = os.path.join(folder, "slow_sockets.so")
            subprocess.run(
                [
                    "cc",
                    "-shared",
                    "-fPIC",
                    "-O2",
                    os.path.join(ROOT, "benchmarks", "slow_sockets.c"),
                    "-o",
                    shim,
                ],
                check=True,
            )
            for mode in ("polls", "waits"):
                seconds, received = self.send(shim, num_bytes, mode)
                self.assertEqual(hashlib.sha256(received).digest(), hashlib.sha256(whole).digest())
                # Only the upper limit: other load may slow it.
                self.assertGreater(seconds, 0.95 * num_bytes * 8 / 0.2e9)
                self.assertLess(seconds, 10 * num_bytes * 8 / 0.2e9)

    def send(self, shim, num_bytes, mode):
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = subprocess.Popen(
                [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(num_bytes), mode],
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ, LD_PRELOAD=shim, SLOW_SOCKETS_GBIT_S="0.2"),
            )
            connection, _ = server.accept()
            received = bytearray()
            with connection:
                while part := connection.recv(1 << 20):
                    received += part
            return float(sender.communicate()[0]), bytes(received)


if __name__ == "__main__":
    unittest.main()
