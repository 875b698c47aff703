# SPDX-License-Identifier: Apache-2.0
"""Trainers against benchmarks: rows follow their configurations, step times leave out the warm-up and
evaluations, and the table has every row. Small scripts replace the trainers and the benchmarks."""

import array
import importlib.util
import os
import subprocess
import sys
import unittest

from study_support import EPOCH_COLUMNS, ROOT, STEP_COLUMNS, ToolTest, write_csv

sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import trainers
from token_files import serialize
from trainers import ROWS

TOOL = os.path.join(ROOT, "benchmarks", "compare_trainers")

TRAINER = r"""#!{python}
import os, sys
o = dict(argument.split("=", 1) for argument in sys.argv[3:])
folder = os.path.join(o["metrics.dir"], o["metrics.run_name"])
os.makedirs(folder)
for name, text in FILES.items():
    with open(os.path.join(folder, name), "w") as f:
        f.write(text)
"""
BENCHMARK = '#!{python}\nprint("[info] starts")\nprint(\'{"ms": 39.0}\')\n'


def settings(name, gpus=1):
    return {**trainers.read_config(name), **trainers.own_settings(ROWS[name], gpus)}


def write_run(folder):
    """60 steps: the first 20 are slow, an evaluation of 3 s follows step 40, another of 2 s the last step."""
    rows = []
    for step, ms, seconds, now in (
        (10, 400, 4.0, 100),
        (20, 100, 1.0, 101),
        (30, 30, 0.3, 101.3),
        (40, 50, 0.5, 101.8),
        (50, 40, 0.4, 105.2),
        (60, 40, 0.4, 105.6),
    ):
        rows.append([step, 0.5, ms, 1000 / ms, 1.5, 0.25, 2.5, seconds, "", now])
    write_csv(os.path.join(folder, "steps.csv"), STEP_COLUMNS + ["time"], rows)
    epoch = ["7", "abc", "cpu", 1, 0, 1, "fp32", 48, 25, 1, 100]
    write_csv(
        os.path.join(folder, "epochs.csv"),
        EPOCH_COLUMNS + ["test_loss", "time"],
        [[*epoch, 0, "", 2.5, 104.8], [*epoch, 1, "", 2.4, 107.6]],
    )


class Rows(unittest.TestCase):
    def test_a_configuration_is_read_by_full_names(self):
        config = trainers.read_config("vit_b_16_imagefolder")
        self.assertEqual(
            (config["model.ema_decay"], config["data.rand_augment_ops"], config["ddp.bucket_cap_mb"]),
            ("0.99973", "2", "100"),
        )
        self.assertEqual(
            trainers.read_config("resnet50_synthetic")["context.communicator.nccl_max_ctas"], "24"
        )
        for name in ROWS:
            self.assertGreaterEqual(min(trainers.batch(settings(name, 2))), 1, name)

    def test_gpus_share_a_global_batch_where_the_configuration_says_so(self):
        batches = {name: (trainers.batch(settings(name)), trainers.batch(settings(name, 2))) for name in ROWS}
        self.assertEqual(batches["cifar10_vit_s_4"], ((512, 1), (256, 1)))
        self.assertEqual(batches["qwen2_0_5b_full"], ((4, 16), (4, 8)))
        self.assertEqual(batches["gpt2_124m"], ((16, 4), (16, 4)))

    def test_a_benchmark_has_the_settings_of_the_trainers_step(self):
        lora = trainers.benchmark_settings(ROWS["lora_qwen2_7b"], settings("lora_qwen2_7b"))
        expected = dict(
            model="qwen2-7b",
            batch_size="2",
            accumulate="4",
            seq_len="4096",
            lora_rank="64",
            lora_alpha="128",
            lora_dropout="0.05",
            lora_dtype="bf16",
            param_dtype="bf16",
            bucket_cap_mb="400",
            clip="1.0",
            step="graph",
            steps=8,
            rounds=3,
            warmup=5,
        )
        self.assertEqual(lora, expected)
        vit = trainers.benchmark_settings(ROWS["cifar10_vit_s_4"], settings("cifar10_vit_s_4", 2))
        self.assertEqual(
            (vit["model"], vit["batch_size"], vit["image_size"], vit["fp32_grads"]),
            ("vit_s_4", "256", "32", "false"),
        )

    def test_remarks_name_what_only_the_trainer_does(self):
        def remark(name, source=""):
            return trainers.remark(ROWS[name], settings(name), source)

        self.assertEqual(
            remark("cifar10_vit_s_4"),
            "the benchmark lacks train.label_smoothing=0.1, train.mixup=0.8, train.cutmix=1, "
            "train.max_grad_norm=1, model.stochastic_depth=0.1",
        )
        self.assertEqual(remark("gpt2_124m", "text"), "")
        self.assertIn("each document", remark("lora_qwen2_7b", "chats.jsonl"))
        self.assertEqual(remark("lora_qwen2_7b", "random"), "")


class Runs(ToolTest):
    def test_steps_behind_the_warm_up_count_and_evaluations_are_apart(self):
        write_run(os.path.join(self.folder, "run"))
        run = trainers.of_run(self.folder, "run", 60)
        self.assertEqual(
            run,
            dict(ms=40.0, exposed_comm_ms=1.5, loader_wait_ms=0.25, evaluations=2, evaluation_seconds=5.0),
        )
        write_csv(os.path.join(self.folder, "run", "evals.csv"), ["step"], [[0], [20], [40], [60]])
        # Not the one before the first step.
        self.assertEqual(trainers.of_run(self.folder, "run", 60)["evaluations"], 3)
        os.remove(os.path.join(self.folder, "run", "steps.csv"))
        with self.assertRaisesRegex(ValueError, "steps.csv"):
            trainers.of_run(self.folder, "run", 60)

    def test_the_benchmarks_two_runs_count_alike(self):
        self.assertAlmostEqual(trainers.ratio(9.0, 10.0, 10.0), 0.95)

    def test_tokens_are_repeated_document_by_document(self):
        path = os.path.join(self.folder, "train.safetensors")
        tokens = dict(
            tokens=array.array("H", [1, 2, 3, 4, 5]),
            documents=array.array("q", [0, 2, 5]),
            targets=("U8", b"\1\0\1\1\0"),
        )
        with open(path, "wb") as f:
            f.writelines(serialize(tokens, dict(vocab_size="6")))
        trainers.repeat(path, 11)
        with open(path, "rb") as f:
            repeated = f.read()
        expected = dict(
            tokens=tokens["tokens"] * 3,
            documents=array.array("q", [0, 2, 5, 7, 10, 12, 15]),
            targets=("U8", b"\1\0\1\1\0" * 3),
        )
        self.assertEqual(
            repeated, b"".join(bytes(part) for part in serialize(expected, dict(vocab_size="6")))
        )


class WholeCall(ToolTest):
    def call_tool(self, *arguments):
        return subprocess.run(
            [
                sys.executable,
                TOOL,
                os.path.join(self.folder, "build"),
                os.path.join(self.folder, "out"),
                *arguments,
            ],
            capture_output=True,
            text=True,
        )

    def script(self, name, text):
        self.write(f"build/{name}", text.replace("{python}", sys.executable))
        os.chmod(os.path.join(self.folder, "build", name), 0o755)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_the_table_has_each_row_or_why_it_is_missing(self):
        write_run(os.path.join(self.folder, "run"))
        files = {name: self.read(f"run/{name}") for name in ("steps.csv", "epochs.csv")}
        self.script("examples/resnet_ddp", TRAINER.replace("FILES", repr(files)))
        self.script("benchmarks/bench_resnet", BENCHMARK)
        common = ["--gpus", "1", "--set", "context.device=cpu", "--set", "train.max_steps=60"]
        done = self.call_tool("--rows", "resnet50_synthetic,cifar10_vit_s_4", *common)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        table = self.read("out/trainers.md")
        self.assertIn(
            "| resnet50_synthetic | 1 | 256 x 1 | 39.000 | 40.000 | 0.975 | 0.98 | 1.500 | 0.250 | 2 in 5.00 "
            "s |",
            table,
        )
        self.assertIn("not run: needs --cifar10", table)
        self.script("benchmarks/bench_resnet", "#!/bin/sh\nexit 3\n")
        done = self.call_tool("--rows", "resnet50_synthetic", *common)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("FAILED: bench_resnet ended with", done.stdout)

    def test_mistakes_in_the_call_are_named(self):
        for arguments, said in (
            (["--rows", "resnet51"], "there is no resnet51; there are resnet50_synthetic"),
            (["--gpus", "two"], "whole numbers"),
            (["--set", "device"], "key=value"),
        ):
            done = self.call_tool(*arguments)
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertIn(said, done.stderr)


class OtherPrograms(unittest.TestCase):
    def test_the_gpu_suite_refuses_sections_it_lacks(self):
        done = subprocess.run(
            ["bash", os.path.join(ROOT, "benchmarks", "run_gpu_suite.sh"), "lm", "loar"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 64, done.stdout + done.stderr)
        self.assertIn("there is no section loar", done.stderr)
        done = subprocess.run(
            ["bash", os.path.join(ROOT, "benchmarks", "run_gpu_suite.sh"), "--help"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0)
        self.assertIn("usage: benchmarks/run_gpu_suite.sh", done.stdout)
        self.assertTrue(done.stdout.rstrip().endswith("and named"), done.stdout)

    def test_help_of_the_comparisons_ends_well(self):
        for name in ("compare.py", "pytorch_lm.py"):
            done = subprocess.run(
                [sys.executable, os.path.join(ROOT, "benchmarks", name), "--help"],
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("PyTorch", done.stdout)


if __name__ == "__main__":
    unittest.main()
