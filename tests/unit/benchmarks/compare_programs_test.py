# SPDX-License-Identifier: Apache-2.0
"""The comparison's rows of whole programs: what is taken from what they print and write, whose turn it is,
and what becomes of a side that fails. No program of a benchmark runs here."""

import os
import subprocess
import sys
import tempfile
import types
import unittest

from study_support import ROOT, need

need("torch")
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import interleaved  # noqa: E402
import programs  # noqa: E402
import results  # noqa: E402
import rows  # noqa: E402

TOOL = os.path.join(ROOT, "benchmarks", "compare_pytorch")

ALL_REDUCE = """# 2 ranks, float32 sum in place, NCCL_NVLS_ENABLE=0, median of 11 paired rounds
mode          bytes    nccl_us     ddp_us  nccl_alg
eager          4096      10.00      13.00      0.40
eager       4194304      40.00      41.00    104.00
graph          4096       6.00       6.50      0.60
graph      16777216      76.00      80.00    209.00
"""


class OtherPrograms(unittest.TestCase):
    def test_the_worst_all_reduce_is_told_on_both_sides_of_4_mib(self):
        worst = programs.worst_all_reduce(ALL_REDUCE)
        self.assertEqual(worst["value"], 0.95)
        self.assertEqual(
            worst["remark"], "least at 16 MiB (graph); below 4 MiB at most 3.0 us more (eager, 4 KiB)"
        )
        self.assertEqual(worst["extra_us"], dict(eager=3.0, graph=0.5))
        asked = list(
            results.also_asked({"all_reduce/2": dict(sides=dict(libddp=worst), row="all_reduce", gpus=2)})
        )
        self.assertEqual(
            asked,
            [
                (
                    "all-reduce below 4 MiB: largest excess over NCCL's time",
                    2,
                    "3.0 us (eager) / 0.5 us (graph)",
                    "<= 4 us (eager), 2 us (graph)",
                    "",
                )
            ],
        )
        with self.assertRaisesRegex(ValueError, "both sides of 4 MiB"):
            programs.worst_all_reduce("eager 4096 1 2\n")

    def test_a_run_is_timed_from_its_first_counted_step_to_its_last_evaluation(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "run"))
            for name, lines in (
                ("steps", ["step,interval_seconds,time", "49,2.5,1002.5", "99,2,1004.5"]),
                ("epochs", ["epoch,epoch_seconds,time", "0,4.5,1005", "1,4.75,1012.25"]),
            ):
                with open(os.path.join(folder, "run", f"{name}.csv"), "w") as f:
                    f.write("\n".join(lines) + "\n")
            said = programs.seconds_of_run(folder)
            self.assertEqual(said, dict(value=12.25, train_seconds=9.25))
            self.assertEqual(
                programs.about_runs([dict(said, accuracy="90 %")]),
                dict(value=12.25, remark="test accuracy 90 %, training alone 9.25 s"),
            )
            os.remove(os.path.join(folder, "run", "epochs.csv"))
            with self.assertRaisesRegex(ValueError, "holds no epochs.csv"):
                programs.seconds_of_run(folder)

    def test_fed_steps_are_told_by_the_rate_of_those_that_are_not(self):
        sides = programs.fed_against_synthetic(
            dict(synthetic=dict(ms=27.0), libddp=dict(ms=30.0), other=dict(error="e")), 8
        )
        self.assertEqual(sides["libddp"]["value"], 0.9)
        self.assertEqual(
            sides["libddp"]["remark"],
            "30.00 ms per step from JPEG with 8 threads per GPU, 27.00 ms on a resident batch",
        )
        self.assertEqual(sides["other"], dict(error="e"))
        self.assertEqual(
            programs.fed_against_synthetic(dict(synthetic=dict(error="e"), libddp=dict(ms=1.0)), 8),
            dict(libddp=dict(error="e")),
        )

    def test_sides_run_in_turn_and_the_run_of_the_median_time_is_told(self):
        calls = []

        def runs(name, *seconds):
            left = list(seconds)

            def run():
                calls.append(name)
                return dict(value=left.pop(0), train_seconds=9.0, accuracy=f"{90 + len(left)} %")

            return run

        def fails():
            calls.append("c")
            raise KeyError("seconds")

        done = programs.in_turn(dict(a=runs("a", 5.0, 3.0, 4.0), b=runs("b", 9.0, 9.0, 9.0), c=fails), 3)
        self.assertEqual("".join(calls), "abcba" + "ab")
        self.assertEqual(
            programs.about_runs(done["a"]),
            dict(value=4.0, remark="test accuracy 92 %, 91 %, 90 %, training alone 9.00 s, 3.00 to 5.00 s"),
        )
        self.assertEqual(programs.about_runs(done["c"]), dict(error="KeyError: 'seconds'"))

    def test_a_row_whose_input_is_bad_fails_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            broken = os.path.join(folder, "broken.tar")
            with open(broken, "wb") as f:
                f.write(b"no tar" * 1000)
            o = types.SimpleNamespace(
                photographs=broken, peers=[], set=[], build=folder, out=folder, rounds=1
            )
            for name in ("resnet50_jpeg", "jpeg_loader"):
                sides, rounds = programs.measure(o, name, 1)
                self.assertIn("could not be opened", sides["libddp"]["error"])
                self.assertEqual(rounds, 0)

    def test_a_program_that_takes_too_long_is_asked_to_end(self):
        with tempfile.TemporaryDirectory() as folder:
            program, note = os.path.join(folder, "program.py"), os.path.join(folder, "note")
            with open(program, "w") as f:
                f.write(
                    "import signal, sys, time\n"
                    f"def end(*_):\n    open({note!r}, 'w').close()\n    sys.exit(1)\n"
                    "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(60)\n"
                )
            launcher, limit = interleaved.launcher, programs.TIMEOUT
            self.addCleanup(setattr, interleaved, "launcher", launcher)
            self.addCleanup(setattr, programs, "TIMEOUT", limit)
            interleaved.launcher, programs.TIMEOUT = (lambda program, world: [sys.executable]), 3
            with self.assertRaises(subprocess.TimeoutExpired):
                programs.run([program], 1, os.path.join(folder, "log"))
            self.assertTrue(os.path.exists(note))

    def test_the_jpeg_rows_run_with_the_settings_of_the_steps(self):
        commands = {}

        def run(sides, *_, **__):
            commands.update(sides)
            return {name: dict(ms=25.6, rounds_ms=[20.0, 32.0, 25.6]) for name in sides}

        self.addCleanup(setattr, interleaved, "run", interleaved.run)
        interleaved.run = run
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "train"))
            o = types.SimpleNamespace(
                photographs=folder, peers=["graph"], set=["device=cpu"], out=folder, build="build", rounds=3
            )
            sides, rounds = programs.measure(o, "jpeg_loader", 1)
            self.assertEqual((list(sides), rounds), (["libddp", "libddp_nvjpeg", "eager"], 3))
            workers = programs.num_workers(1)
            said = "8,000 to 12,800 images/s"
            self.assertEqual(sides["libddp_nvjpeg"], dict(value=10000, remark=f"{workers} threads, {said}"))
            self.assertEqual(
                sides["eager"], dict(value=10000, remark=f"DataLoader and PIL, {workers} processes, {said}")
            )
            self.assertEqual(commands["libddp_nvjpeg"], commands["libddp"] + ["jpeg_decoder=nvjpeg"])
            for command, own in ((commands["libddp"], "step=load"), (commands["eager"], f"data={folder}")):
                self.assertTrue(
                    {own, "device=cpu", "batch_size=256", f"num_workers={workers}"} <= set(command), command
                )
            table = results.speed_table({"jpeg_loader/1": dict(sides=sides, row="jpeg_loader", gpus=1)})
            self.assertIn(
                "on the GPU, images/s | 1 |  | 10,000 | 10,000 | 1.00 | 9,000 | 12,000 |", table[-1]
            )
            o.peers = []
            self.assertNotIn("eager", programs.measure(o, "jpeg_loader", 1)[0])

            programs.measure(o, "resnet50_jpeg", 2)
            step = rows.ROWS["resnet50"]
            own = step.ours(2)["libddp_bf16_wire"]
            self.assertEqual(commands["synthetic"][1:], step.settings(2, own) + own + o.set)
            self.assertIn("bucket_cap_mb=auto", commands["synthetic"])

    def test_a_row_that_needs_an_option_says_so(self):
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [
                    sys.executable,
                    TOOL,
                    "build",
                    out,
                    "--rows",
                    "cifar10",
                    "--gpus",
                    "1",
                    "--set",
                    "device=cpu",
                ],
                capture_output=True,
                text=True,
            )
            self.assertIn("not run: " + "--cifar10 was not given", done.stdout, done.stderr)


if __name__ == "__main__":
    unittest.main()
