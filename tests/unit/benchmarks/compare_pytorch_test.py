# SPDX-License-Identifier: Apache-2.0
"""The comparison with PyTorch: programs take turns, a failing one harms no other, rows merge, and tables tell
the best peer. No program of a benchmark runs here: small scripts stand
for them."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT, TURNS, need

from profile_trace import TRACE

need("torch")
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import emulated  # noqa: E402
import interleaved  # noqa: E402
import results  # noqa: E402
import rows  # noqa: E402
import step_profile  # noqa: E402

TOOL = os.path.join(ROOT, "benchmarks", "compare_pytorch")

# A program that takes turns as interleaved.py tells and notes when it did; its steps take `ms`.
TAKES_TURNS = (
    TURNS
    + r"""def note(what):
    if "notes" in o:
        with open(o["notes"], "a") as f:
            f.write(o["name"] + " " + what + "\n")
wait("start")
note("start")
if o.get("fails") == "start":
    sys.exit("out of memory, says the script")
answer("ready", 100.0)
times = [float(ms) for ms in o["ms"].split(":")]
for index in range(int(o["rounds"])):
    wait(f"go{index}")
    note(f"round {index}")
    if o.get("fails") == f"round {index}":
        sys.exit(3)
    answer(f"done{index}", times[index % len(times)])
if "profile" in o:
    wait("profile")
    with open(o["profile"], "w") as f:
        f.write(TRACE)
    answer("profiled", 5)
print(json.dumps(dict(host_us=12.5)))
"""
)


class Turns(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.program = self.script(
            "program",
            TAKES_TURNS.replace("{python}", sys.executable).replace("TRACE", repr(json.dumps(TRACE))),
        )
        self.notes = os.path.join(self.folder.name, "notes")
        launcher = interleaved.launcher
        self.addCleanup(setattr, interleaved, "launcher", launcher)
        interleaved.launcher = lambda program, world: []  # torchrun takes its time

    def script(self, name, text):
        path = os.path.join(self.folder.name, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, 0o755)
        return path

    def run_programs(self, settings, rounds, **options):
        commands = {name: [self.program, f"notes={self.notes}"] + own for name, own in settings.items()}
        return interleaved.run(commands, 1, os.path.join(self.folder.name, "log"), rounds, **options)

    def test_programs_start_one_by_one_and_take_turns_from_both_ends(self):
        measured = self.run_programs(dict(a=["ms=3:9:4"], b=["ms=2:1:1"]), 3)
        with open(self.notes) as f:
            self.assertEqual(
                f.read().splitlines(),
                [
                    "a start",
                    "b start",
                    "a round 0",
                    "b round 0",
                    "b round 1",
                    "a round 1",
                    "a round 2",
                    "b round 2",
                ],
            )
        self.assertEqual(measured["a"]["rounds_ms"], [3, 9, 4])
        self.assertEqual((measured["a"]["ms"], measured["b"]["ms"]), (4, 1))  # medians
        self.assertEqual(measured["a"]["said"], dict(host_us=12.5))
        self.assertEqual(len(measured["b"]["windows"]), 3)

    def test_a_program_that_fails_harms_no_other(self):
        for moment in ("start", "round 1"):
            measured = self.run_programs(
                dict(a=["ms=3"], b=["ms=2", f"fails={moment}"], c=["ms=5"]), 3, keep_going=True
            )
            self.assertEqual((measured["a"]["ms"], measured["c"]["rounds_ms"]), (3, [5, 5, 5]))
            self.assertIn("b ended with", measured["b"]["error"])
            self.assertIn("log.b.log", measured["b"]["error"])
            with self.assertRaisesRegex(RuntimeError, "b ended with"):
                self.run_programs(dict(a=["ms=3"], b=["ms=2", f"fails={moment}"]), 3)

    def test_each_program_writes_its_profile_in_its_turn(self):
        measured = self.run_programs(dict(a=["ms=1"], b=["ms=1"]), 1, profile=True)
        self.assertEqual(step_profile.summarize(measured["b"]["trace"], 1)["kernels"], 6)

    def test_the_whole_call_measures_merges_and_says_what_could_not_run(self):
        with open(self.program) as f:
            self.script("build/benchmarks/bench_resnet", f.read())
        out = os.path.join(self.folder.name, "out")
        command = [
            sys.executable,
            TOOL,
            os.path.join(self.folder.name, "build"),
            out,
            "--peers",
            "none",
            "--rounds",
            "3",
            "--ours",
            "before:ms=9",
            "--ours",
            "libddp:ms=6",
            "--set",
            "device=cpu",
        ]
        first = subprocess.run(command + ["--rows", "resnet18_64"], capture_output=True, text=True)
        self.assertEqual(first.returncode, 0, first.stdout + first.stderr)
        second = subprocess.run(
            command + ["--rows", "resnet18_3x3", "--gpus", "1,4", "--no-profile"],
            capture_output=True,
            text=True,
        )
        self.assertIn("4 GPUs wanted", second.stdout, second.stderr)
        records = results.load(os.path.join(out, "results.json"))
        self.assertEqual(sorted(records), ["resnet18_3x3/1", "resnet18_3x3/4", "resnet18_64/1"])
        self.assertEqual(records["resnet18_64/1"]["sides"]["libddp"]["ms"], 6)
        self.assertEqual(records["resnet18_64/1"]["sides"]["before"]["host_us"], 12.5)
        self.assertEqual(records["resnet18_64/1"]["sides"]["before"]["profile"]["kernels"], 1)  # 6 in 5 steps
        with open(os.path.join(out, "results.csv")) as f:
            self.assertIn("resnet18_64,1,libddp,6.0,6.0,ms,0.52,0.38", f.read())
        with open(os.path.join(out, "table.md")) as f:
            self.assertIn("| ResNet-18, 32 px, batch 64, ms | 1 | 9.000 | 6.000 |", f.read())

        # Rows measured elsewhere, into the document.
        document = self.script("performance_tables.md", f"{results.BEGIN}\n{results.END}\n")
        third = subprocess.run(
            [
                sys.executable,
                TOOL,
                "build",
                os.path.join(self.folder.name, "other"),
                "--rows",
                "none",
                "--add",
                os.path.join(out, "results.json"),
                "--docs",
                document,
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual(third.returncode, 0, third.stderr)
        with open(document) as f:
            self.assertIn("| ResNet-18, 32 px, batch 64, ms | 1 | 9.000 | 6.000 |", f.read())

    def test_a_language_row_runs_its_own_programs_one_after_the_other(self):
        with open(self.program) as f:
            self.script("build/benchmarks/bench_lm", f.read())
        out = os.path.join(self.folder.name, "out")
        command = [
            sys.executable,
            TOOL,
            os.path.join(self.folder.name, "build"),
            out,
            "--peers",
            "none",
            "--rounds",
            "2",
            "--ours",
            "a:ms=640",
            "--ours",
            "b:ms=512",
            "--set",
            "device=cpu",
            "--set",
            f"notes={self.notes}",
        ]
        done = subprocess.run(command + ["--rows", "qwen2_7b_lora"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("16,000.00 tok/s per GPU", done.stdout)
        with open(self.notes) as f:
            self.assertEqual(
                f.read().splitlines(),
                ["a start", "a round 0", "a round 1", "b start", "b round 0", "b round 1"],
            )
        with open(os.path.join(out, "table.md")) as f:
            self.assertIn("tok/s per GPU | 1 |  | 16,000 |  | 16,000 | 17,500 |", f.read())

    def test_mistakes_in_the_call_are_named(self):
        for arguments, said in (
            (["--rows", "resnet51"], "there is no resnet51; there are resnet50, resnet18_512"),
            (["--peers", "jax"], "there is no jax; there are eager"),
            (["--rows", "none", "--add", "nowhere.json"], "--add nowhere.json: there is no such file"),
            (["--gpus", "two"], "give whole numbers"),
            (["--rounds", "0"], "at least 1"),
            (["--program-rounds", "0"], "at least 1"),
            (["--ours", "eager:step=graph"], "a name that is none of eager"),
        ):
            done = subprocess.run(
                [sys.executable, TOOL, "build", "out"] + arguments, capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertIn(said, done.stderr)
        listed = subprocess.run([sys.executable, TOOL, "--list"], capture_output=True, text=True)
        self.assertEqual([line.split()[0] for line in listed.stdout.splitlines()], list(rows.ROWS))

    def test_an_emulated_step_is_found_by_its_name_and_batch(self):
        self.script(
            "resnet50_probe",
            "#!/bin/sh\n[ \"$*\" = 'bf16 plain net' ] || exit 9\n"
            'echo \'{"t":"net","name":"R1_stem4","step_sustained_ms":30.1}\'\n'
            'echo \'{"t":"net","name":"R1_s2d","step_ms":27.0,"step_sustained_ms":28.3}\'\n',
        )
        self.script(
            "resnet18_probe",
            "#!/bin/sh\necho "
            '"{\\"t\\":\\"net\\",\\"N\\":$BATCHES,\\"name\\":\\"$ONLY\\",\\"b2b_us\\":480.0}"\n',
        )
        self.assertEqual(emulated.step_ms(self.folder.name, "resnet50", 256), 28.3)
        self.assertEqual(emulated.step_ms(self.folder.name, "resnet18", 128), 0.48)
        self.script("resnet50_probe", "#!/bin/sh\necho no plan >&2\nexit 1\n")
        with self.assertRaisesRegex(RuntimeError, "resnet50_probe ended with 1: no plan"):
            emulated.step_ms(self.folder.name, "resnet50", 256)


class Settings(unittest.TestCase):
    def test_settings_of_one_program_do_not_reach_the_other(self):
        self.assertEqual(
            interleaved.split_settings(
                ["stem=cifar", "pytorch.compile=true", "lr=1.5"], ("libddp", "pytorch")
            ),
            dict(libddp=["stem=cifar", "lr=1.5"], pytorch=["stem=cifar", "compile=true", "lr=1.5"]),
        )

    def test_each_row_runs_the_peers_that_its_program_has(self):
        def sides(name, chosen=None):
            return rows.ROWS[name].peers(1, chosen)

        self.assertEqual(list(sides("resnet50")), ["eager", "compile", "graph", "compile_graph"])
        self.assertEqual(list(sides("vit_b_16")), ["eager", "compile", "compile_graph"])
        self.assertEqual(
            sides("gpt2"),
            dict(
                eager=["vocab_size=50304", "wrap=false"],
                compile=["compile=true", "vocab_size=50304", "wrap=false"],
            ),
        )
        self.assertEqual(list(sides("bert", ["graph", "compile"])), ["compile"])
        self.assertEqual(sides("qwen2_7b_fp8", ["eager"]), {})
        self.assertEqual(sides("vit_b_16", []), {})
        self.assertEqual(rows.ROWS["resnet50"].peers(2)["eager"], ["step=eager"])

    def test_settings_of_a_language_row(self):
        row = rows.ROWS["qwen2_7b_fp8"]
        own = row.ours(1)
        self.assertEqual(list(own), ["libddp"])  # there is no plain step to compare with
        self.assertEqual(
            own["libddp"],
            ["step=graph", "param_dtype=bf16", "bucket_cap_mb=100", "base_dtype=fp8", "fp32_grads=false"],
        )
        self.assertEqual(
            row.settings(1, own["libddp"]),
            [
                "model=qwen2-7b",
                "batch_size=2",
                "seq_len=4096",
                "lora_rank=64",
                "lora_alpha=128",
                "lora_dropout=0",
                "lora_dtype=bf16",
                "steps=6",
                "warmup=6",
            ],
        )
        accumulated = rows.ROWS["qwen2_1_5b"]
        peer = dict(
            setting.split("=") for setting in accumulated.settings(1, []) + accumulated.peers(1)["eager"]
        )
        # Tokens of a step as in ours.
        self.assertEqual(int(peer["batch_size"]) * int(peer["accumulate"]), 32 * 8)


MACHINE = dict(gpu="H200", torch="2.11", cuda="13.0", commit="abc")


def record(machine=MACHINE, **ms):
    return dict(
        machine=machine,
        rounds=5,
        when="today",
        sides={name: dict(ms=value, peak_mib=1, settings="s") for name, value in ms.items()},
    )


class Tables(unittest.TestCase):
    def cells(self, records, title):
        line = next(line for line in results.speed_table(records) if line.startswith(f"| {title}"))
        return [cell.strip() for cell in line.strip("|").split("|")]

    def test_a_later_call_replaces_a_row_but_a_smaller_machine_does_not(self):
        records = {}
        results.merge(records, "resnet50", 4, dict(not_run="not run: 4 GPUs wanted, 1 there"))
        self.assertEqual(self.cells(records, "ResNet-50")[2], "not run: 4 GPUs wanted, 1 there")
        results.merge(records, "resnet50", 4, record(libddp=40.0))
        results.merge(records, "resnet50", 1, record(libddp=39.0))
        results.merge(records, "resnet50", 4, dict(not_run="not run: 4 GPUs wanted, 1 there"))
        results.merge(records, "resnet50", 1, record(libddp=32.0))
        self.assertEqual(records["resnet50/4"]["sides"]["libddp"]["ms"], 40.0)
        self.assertEqual(records["resnet50/1"]["sides"]["libddp"]["ms"], 32.0)

    def test_the_best_of_each_side_is_compared(self):
        records = {}
        row = record(before=54.0, libddp=32.0, eager=55.0, compile=40.0, graph=52.0)
        results.merge(records, "resnet50", 1, dict(row, emulated_ms=28.0))
        #           img/s: 256 / 54 ms, 256 / 32 ms, …
        self.assertEqual(
            self.cells(records, "ResNet-50"),
            [
                "ResNet-50, 224 px, batch 256 per GPU, img/s per GPU",
                "1",
                "4,741",
                "8,000",
                "4,655",
                "6,400",
                "4,923",
                "1.25",
                "8,500",
                "9,200",
                "0.875",
            ],
        )

    def test_memory_host_work_and_the_emulated_step_are_told_too(self):
        row = record(before=54.0, libddp=32.0, eager=55.0)
        row["sides"]["libddp"].update(
            peak_mib=900, host_us=41.6, settings="step=graph", profile=dict(waits=0.0)
        )
        row["sides"]["eager"].update(peak_mib=1000)
        records = {}
        results.merge(records, "resnet50", 1, dict(row, emulated_ms=28.0))
        self.assertEqual(
            [line[2:4] for line in results.also_asked(records)],
            [
                ("0.875", ">= 0.92"),
                ("0.900 (900 / 1,000 MiB)", "<= 1"),
                ("42 us, 0 waits for the device", "<= 50 us, 0 waits"),
            ],
        )
        scaled = record(libddp=32.0)
        scaled["sides"]["libddp"]["exposed_comm_ms"] = 0.08
        self.assertEqual(
            [line[2] for line in results.also_asked({"resnet50/4": dict(scaled, row="resnet50", gpus=4)})],
            ["0.25% (0.080 ms)"],
        )
        # Eager steps have no such limit.
        results.merge(records, "resnet50", 1, record(before=54.0, eager=55.0))
        self.assertEqual([line[2] for line in results.also_asked(records)], ["1.000 (1 / 1 MiB)"])

    def test_scaling_is_told_against_one_gpu_of_the_same_machine_alone(self):
        records = {}
        results.merge(records, "resnet50", 1, record(machine=dict(MACHINE, gpus=1), libddp=32.0))
        results.merge(records, "resnet50", 4, record(machine=dict(MACHINE, gpus=4), libddp=40.0, eager=60.0))
        lines = [line for line in results.speed_table(records) if line.startswith("| ResNet-50")]
        self.assertIn("| 6,400 (0.800 x one GPU) |", lines[1])
        self.assertIn("| 0.985 x one GPU | 0.99 x one GPU |", lines[1])
        results.merge(records, "resnet50", 1, record(machine=dict(MACHINE, commit="other"), libddp=32.0))
        self.assertNotIn("0.800", "".join(results.speed_table(records)))

    def test_a_row_of_one_number_is_compared_as_its_unit_wants(self):
        records = {}
        for name, ours, theirs in (("cifar10", 10.0, 25.0), ("all_reduce", 0.99, 0.5)):
            results.merge(
                records,
                name,
                2,
                dict(record(), sides=dict(libddp=dict(value=ours, remark="r"), eager=dict(value=theirs))),
            )
        self.assertEqual(self.cells(records, "CIFAR-10")[3:6], ["10.00", "25.00", "2.50"])
        self.assertEqual(self.cells(records, "all-reduce")[3:], ["0.990", "0.500", "1.98", "0.98", "1", ""])
        self.assertIn("r", results.remark_lines(records)[0])

    def test_a_shared_batch_is_a_time_and_failed_sides_are_no_figures(self):
        records = {}
        row = record(libddp=0.7, libddp_bf16_wire=0.65, eager=10.0)
        row["sides"]["graph"] = dict(error="graph ended with 1", settings="s")
        results.merge(records, "resnet18_strong", 2, row)
        self.assertEqual(
            self.cells(records, "ResNet-18")[2:],
            ["", "0.650", "10.00", "failed", "15.38", "0.65", "0.58", ""],
        )
        strong = rows.ROWS["resnet18_strong"]
        self.assertIn("batch_size=128", strong.settings(4, ["step=graph"]))
        self.assertIn("steps=200", strong.settings(4, ["step=graph", "wrap=false"]))
        self.assertIn("steps=40", strong.settings(4, ["step=compile"]))

    def test_rates_of_tokens_and_sequences_count_the_whole_step(self):
        records = {}
        results.merge(records, "gpt2", 1, record(libddp=32.0, eager=80.0, compile=40.0))
        results.merge(records, "bert", 1, record(libddp=25.6))
        results.merge(records, "qwen2_0_5b", 1, record(libddp=4000.0))
        results.merge(records, "vit_b_16", 1, record(libddp=64.0))
        self.assertEqual(
            self.cells(records, "GPT-2"),
            [
                "GPT-2 124M, 16 x 1,024 tokens, tok/s per GPU",
                "1",
                "",
                "512,000",
                "204,800",
                "409,600",
                "1.25",
                "520,000",
                "570,000",
                "",
            ],
        )
        bert = self.cells(records, "BERT")
        self.assertTrue(bert[0].endswith("seq/s per GPU"), bert)
        self.assertEqual((bert[3], self.cells(records, "Qwen2-0.5B")[3]), ("5,000", "131,072"))
        self.assertEqual(
            (self.cells(records, "ViT")[0][-13:], self.cells(records, "ViT")[3]), ("img/s per GPU", "4,000")
        )

    def test_a_side_without_host_time_has_no_figure_for_it(self):
        lines = results.side_table({"gpt2/1": dict(record(libddp=32.0), row="gpt2", gpus=1)})
        self.assertEqual(lines[-1].split(" | ")[3:5], ["32.000", ""])

    def test_how_often_each_side_ran_is_told(self):
        records = {}
        results.merge(records, "resnet50", 1, record(libddp=32.0))
        results.merge(records, "cifar10", 1, dict(record(), sides=dict(libddp=dict(value=13.0)), rounds=1))
        self.assertEqual(
            [line.split(" | ")[-2] for line in results.machine_lines(records)[2:]],
            ["5 rounds", "1 run per side"],
        )

    def test_the_document_changes_between_its_marks_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "performance_tables.md")
            with open(path, "w") as f:
                f.write(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
            results.write_table(path, {"resnet50/1": dict(record(libddp=32.0), row="resnet50", gpus=1)})
            with open(path) as f:
                text = f.read()
            self.assertTrue(
                text.startswith(f"before\n{results.BEGIN}\n\n|")
                and text.endswith(f"\n\n{results.END}\nafter\n"),
                text,
            )
            self.assertNotIn("old", text)
            with open(path, "w") as f:
                f.write("no marks")
            with self.assertRaisesRegex(ValueError, "lacks the marks"):
                results.write_table(path, {})


if __name__ == "__main__":
    unittest.main()
