# SPDX-License-Identifier: Apache-2.0
"""Reading of studies: every mistake names file, line, key and fix; the shipped studies print their golden
jobs. `study_file_test.py --write` makes the golden files anew."""

import array
import os
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT, need

need("yaml")
from scaling import plan  # noqa: E402

GOLDEN = os.path.join(ROOT, "tests", "golden", "studies")
SHIPPED = sorted(
    name[:-5] for name in os.listdir(os.path.join(ROOT, "slurm", "studies")) if name.endswith(".yaml")
)
TOOL = os.path.join(ROOT, "tools", "study.py")
CONFIG = "examples/configs/quickstart.yaml"

GOOD = f"""kind: strong
program: resnet_ddp
config: {CONFIG}
gpus: [1, 2, 4]
steps: 100
"""

# (text, the line it names, what it says)
MISTAKES = {
    "zero GPUs": (
        GOOD.replace("[1, 2, 4]", "[0, 2]"),
        4,
        "gpus: '0' is not a number of GPUs: give whole numbers from 1",
    ),
    "GPUs below zero": (GOOD.replace("[1, 2, 4]", "-2"), 4, "gpus: '-2' is not a number of GPUs"),
    "no GPUs": (GOOD.replace("[1, 2, 4]", "[]"), 4, "gpus: the list is empty"),
    "half a GPU": (GOOD.replace("[1, 2, 4]", "[1, 2.5]"), 4, "gpus: '2.5' is not a number of GPUs"),
    "GPUs twice": (GOOD.replace("[1, 2, 4]", "[2, 2]"), 4, "gpus: 2 is given twice"),
    "GPUs and CPU ranks": (GOOD + "cpu_ranks: [1]\n", 4, "give either gpus .one rank per GPU. or cpu_ranks"),
    "batch smaller than its GPUs": (
        GOOD + "global_batch_size: 3\n",
        6,
        "global_batch_size: 3 samples are fewer than the 4 ranks that share them; fix: at least 4",
    ),
    "varied batch smaller than its GPUs": (
        GOOD.replace("strong", "sensitivity") + "vary:\n  loader.global_batch_size: [8, 2]\n",
        7,
        "loader.global_batch_size=2 is not a batch that 4 ranks can share; fix: at least 4",
    ),
    "no batch at all": (
        GOOD + "global_batch_size: 0\n",
        6,
        "global_batch_size: '0' is not a whole number from 1",
    ),
    "micro-batch that cannot be": (
        GOOD.replace("[1, 2, 4]", "4") + "global_batch_size: 5\nmicro_batch_size: 1\n",
        7,
        "micro_batch_size: 5 samples cannot be cut",
    ),
    "unknown key": (
        GOOD + "repeat: 3\n",
        6,
        "repeat: no such key, did you mean repeats.; there are title, kind",
    ),
    "unknown program": (
        GOOD.replace("resnet_ddp", "resnet_dpp"),
        2,
        "program: unknown value 'resnet_dpp', did you mean resnet_ddp.; one of",
    ),
    "a path that is no file's": (
        GOOD.replace("resnet_ddp", "./train").replace(CONFIG, "none.yaml"),
        3,
        "config: there is no file none.yaml .seen from /",
    ),
    "two ways to set the batch": (
        GOOD + "batch_size_setting: a.b\nglobal_batch_size_setting: a.c\n",
        6,
        "give either batch_size_setting .of one rank. or global_batch_size_setting .of all ranks.",
    ),
    "the batch of a sensitivity study": (
        GOOD.replace("strong", "sensitivity") + "batch_size_setting: a.b\nvary:\n  amp.dtype: [bf16]\n",
        6,
        "batch_size_setting: a key of strong and weak studies, but this study's kind is sensitivity",
    ),
    "no setting that sets the batch": (
        GOOD + "batch_size_setting: batch\n",
        6,
        "'batch' is not a setting: give its full name",
    ),
    "the batch's own setting": (
        GOOD + "batch_size_setting: a.b\nsettings:\n  a.b: 3\n",
        8,
        "the study sets a.b, which batch_size_setting names; fix: leave it out of settings",
    ),
    "the length's own setting": (
        GOOD.replace("strong", "sensitivity") + "steps_setting: a.n\nvary:\n  a.n: [3]\n",
        8,
        "the study sets a.n, which steps_setting names; fix: leave it out of vary",
    ),
    "unequal shares": (
        GOOD + "global_batch_size: 6\nbatch_size_setting: a.b\n",
        7,
        "a.b is the batch of one rank, and 6 samples are no equal shares of 4 ranks; fix: another",
    ),
    "unknown kind": (
        GOOD.replace("strong", "string"),
        1,
        "kind: unknown value 'string', did you mean strong",
    ),
    "key twice": (GOOD + "steps: 100\n", 6, "steps: given twice"),
    "no config": (
        GOOD.replace(CONFIG, "examples/configs/none.yaml"),
        3,
        "config: there is no file examples/configs/none.yaml",
    ),
    "zero repeats": (GOOD + "repeats: 0\n", 6, "repeats: '0' is not a whole number from 1 to 1000"),
    "only warm-up": (
        GOOD + "warmup_steps: 100\n",
        6,
        "warmup_steps: 100 of 100 steps leave nothing to measure",
    ),
    "no interval": (
        GOOD + "warmup_steps: 60\nlog_every: 50\n",
        7,
        "log_every: 50: no interval of that many steps fits .* at most 40",
    ),
    "another kind's key": (
        GOOD + "batch_size_per_gpu: 8\n",
        6,
        "batch_size_per_gpu: a key of weak studies, but this study's kind is strong",
    ),
    "a setting of the study": (
        GOOD + "settings:\n  train.max_steps: 3\n",
        7,
        "train.max_steps: a study sets this itself; fix: use steps",
    ),
    "a setting that a key sets": (
        GOOD + "settings:\n  loader.global_batch_size: 64\n",
        7,
        "global_batch_size sets loader.global_batch_size",
    ),
    "no setting's name": (
        GOOD + "settings:\n  batch: 3\n",
        7,
        "batch: not a setting: its name is section.name",
    ),
    "nothing varied": (GOOD.replace("strong", "sensitivity"), None, "vary: missing; fix: add it"),
    "varied twice": (
        GOOD.replace("strong", "sensitivity") + "vary:\n  amp.dtype: [bf16, bf16]\n",
        7,
        "bf16 is given twice",
    ),
    "varied with a comma": (
        GOOD.replace("strong", "sensitivity") + "vary:\n  data.mean: ['1,2']\n",
        7,
        "holds a comma or blank",
    ),
    "no time": (GOOD + "time: 90\n", 6, "time: '90' is not a time limit: give .days-.hours:minutes:seconds"),
    "sbatch option of ours": (GOOD + "sbatch: [--nodes=3]\n", 6, "sbatch: tools/study.py sets --nodes"),
    "no sbatch option": (GOOD + "sbatch: [partition=gpu]\n", 6, "'partition=gpu' is not an option of sbatch"),
    "sbatch option of ours with a blank": (
        GOOD + "sbatch: ['--nodes 4']\n",
        6,
        "sbatch: tools/study.py sets --nodes",
    ),
    "sbatch folder": (GOOD + "sbatch: [--chdir=/tmp]\n", 6, "sbatch: tools/study.py sets --chdir"),
    "sbatch order": (
        GOOD + "sbatch: [--dependency=afterok:3]\n",
        6,
        "sbatch: tools/study.py sets --dependency",
    ),
    "sbatch log": (GOOD + "sbatch: [--output=x]\n", 6, "sbatch: tools/study.py sets --output"),
    "sbatch option with a blank": (
        GOOD + "sbatch: ['--partition gpu']\n",
        6,
        "'--partition gpu' holds a blank: give --name=value",
    ),
    "accumulation in a weak study": (
        GOOD.replace("strong", "weak") + "settings:\n  train.grad_accum_steps: 4\n",
        7,
        "batch_size_per_gpu sets train.grad_accum_steps in a weak study",
    ),
    "learning rate that only warms up": (
        GOOD + "settings:\n  lr_schedule.warmup_steps: 100\n",
        7,
        "lr_schedule.warmup_steps=100 does not end within the 100 steps of a run",
    ),
    "varied warm-up of the learning rate": (
        GOOD.replace("strong", "sensitivity") + "vary:\n  lr_schedule.warmup_steps: [0, 200]\n",
        7,
        "lr_schedule.warmup_steps=200 does not end",
    ),
    "no YAML": (GOOD + "gpus: [1, 2\n", 7, "not YAML: "),
    "no mapping": ("- 1\n", 1, "study: give keys and values"),
    "nothing": ("# nothing\n", 1, "the file is empty"),
    "steps missing": (GOOD.replace("steps: 100\n", ""), None, "steps: missing; fix: add it"),
}


def call(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, cwd=ROOT)


class Mistakes(unittest.TestCase):
    def test_every_mistake_names_file_line_key_and_fix(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "study.yaml")
            for name, (text, line, message) in MISTAKES.items():
                with self.subTest(name):
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(text)
                    where = rf"^{path}:{line}: " if line else rf"^{path}: "
                    with self.assertRaisesRegex(plan.StudyError, where + ".*" + message):
                        plan.load(path, ROOT)

    def test_the_tool_ends_with_64_and_writes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "study.yaml")
            with open(path, "w", encoding="utf-8") as file:
                file.write(GOOD.replace("[1, 2, 4]", "[0]"))
            done = call(path, "--output", os.path.join(folder, "out"))
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertRegex(done.stderr, rf"^error: {path}:4: gpus: ")
            self.assertEqual(os.listdir(folder), ["study.yaml"])
            self.assertEqual(call(os.path.join(folder, "none.yaml")).returncode, 64)
            self.assertEqual(call(path, "--locall").returncode, 64)
            with open(path, "wb") as file:
                file.write(b"kind: \xff\n")
            done = call(path)
            self.assertEqual(done.returncode, 64)
            self.assertIn("not UTF-8 text", done.stderr)


class Plans(unittest.TestCase):
    def load(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "study.yaml")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return plan.load(path, ROOT)

    def test_ranks_are_spread_evenly_over_the_fewest_nodes(self):
        self.assertEqual(
            [plan.placement(n, 8) for n in (1, 8, 12, 16, 10, 7)],
            [(1, 1), (1, 8), (2, 6), (2, 8), (2, 5), (1, 7)],
        )
        self.assertEqual(plan.placement(10, 4), (5, 2))

    def test_values_stay_text(self):
        study = self.load(
            GOOD.replace("strong", "sensitivity")
            + "vary:\n  amp.dtype: [off, bf16]\n  ddp.bucket_cap_mb: [1.0, 25]\n"
        )
        self.assertEqual(study.vary, {"amp.dtype": ["off", "bf16"], "ddp.bucket_cap_mb": ["1.0", "25"]})
        self.assertEqual(
            [run.varied["ddp.bucket_cap_mb"] for run in study.groups[0].runs[::3]], ["1.0", "25"] * 2
        )

    def test_a_global_batch_is_kept_by_accumulation(self):
        study = self.load(
            GOOD.replace("[1, 2, 4]", "[1, 4, 12]") + "global_batch_size: 512\nmicro_batch_size: 16\n"
        )
        self.assertEqual(
            [group.settings for group in study.groups],
            [
                ["loader.global_batch_size=16", "train.grad_accum_steps=32"],
                ["loader.global_batch_size=64", "train.grad_accum_steps=8"],
                # 128 over 12: 10 or 11 a rank, the mean weighted; 256 would be 22.
                ["loader.global_batch_size=128", "train.grad_accum_steps=4"],
            ],
        )

    def test_the_batch_is_the_promised_one_whatever_the_configuration_accumulates(self):
        self.assertEqual(
            [group.settings[-1] for group in self.load(GOOD).groups], ["train.grad_accum_steps=1"] * 3
        )
        weak = self.load(GOOD.replace("strong", "weak") + "batch_size_per_gpu: 4\n")
        self.assertEqual(
            weak.groups[2].settings,
            ["train.batch_size=4", "loader.global_batch_size=0", "train.grad_accum_steps=1"],
        )

    def test_a_program_has_names_of_its_own_for_batch_and_length(self):
        each, shared = "batch_size_setting: a.b\n", "global_batch_size_setting: a.b\n"
        strong, weak = (
            GOOD + "global_batch_size: 8\n",
            GOOD.replace("strong", "weak") + "batch_size_per_gpu: 3\n",
        )
        for text, parts in (
            (strong + each, [("8", "1"), ("4", "1"), ("2", "1")]),
            (strong + shared, [("8", "1")] * 3),
            (strong + each + "micro_batch_size: 2\n", [("2", "4"), ("2", "2"), ("2", "1")]),
            (weak + each, [("3", "1")] * 3),
            (weak + shared, [("3", "1"), ("6", "1"), ("12", "1")]),
        ):
            study = self.load(text + "steps_setting: a.n\n")
            self.assertEqual(
                [group.settings for group in study.groups],
                [[f"a.b={batch}", f"train.grad_accum_steps={number}"] for batch, number in parts],
            )
            self.assertIn("a.n=100", study.settings)
            self.assertFalse([word for word in study.settings if "max_steps" in word])

    def test_points_of_more_ranks_than_asked_stay_out(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "study.yaml")
            with open(path, "w", encoding="utf-8") as file:
                file.write(GOOD)
            self.assertEqual([group.ranks for group in plan.load(path, ROOT, max_ranks=2).groups], [1, 2])
            with self.assertRaisesRegex(plan.StudyError, "--max-ranks 0: the smallest point .* has 1 rank"):
                plan.load(path, ROOT, max_ranks=0)

    def test_the_warm_up_of_the_learning_rate_is_the_studys_own(self):
        self.assertIn("lr_schedule.warmup_steps=0", self.load(GOOD).settings)
        own = self.load(GOOD + "settings:\n  lr_schedule.warmup_steps: 7\n").settings
        self.assertEqual([word for word in own if "warmup" in word], ["lr_schedule.warmup_steps=7"])

    def test_one_repeat_of_every_point_comes_before_the_next(self):
        study = self.load(GOOD)
        self.assertEqual([run.name for run in study.runs][:4], ["n001_r1", "n002_r1", "n004_r1", "n001_r2"])

    def test_the_time_limit_in_seconds(self):
        need("yaml")
        from scaling import launch

        self.assertEqual([launch.seconds(text) for text in ("00:30:00", "1-02:03:04")], [1800, 93784])


class OtherTools(unittest.TestCase):
    def test_random_tokens_are_whole_documents(self):
        program = os.path.join(ROOT, "tools", "random_tokens.py")
        with tempfile.TemporaryDirectory() as folder:
            # Documents longer than what is drawn repeat it.
            for length in (3000, 700):
                done = subprocess.run(
                    [
                        sys.executable,
                        "-c",
                        SMALL_BLOCK,
                        program,
                        folder,
                        "--vocab-size",
                        "9",
                        "--tokens",
                        "2500",
                        "--document-length",
                        str(length),
                    ],
                    capture_output=True,
                    text=True,
                )
                self.assertIn(
                    f" {-(-2500 // length) * length} tokens, the longest {length}", done.stdout, done.stderr
                )
            self.assertEqual(
                subprocess.run([sys.executable, program, "--tokens", "x"], capture_output=True).returncode, 64
            )

    def test_random_tokens_for_masking_are_whole_texts_of_bert(self):
        program = os.path.join(ROOT, "tools", "random_tokens.py")
        words = ["--vocab-size", "9", "--tokens", "300", "--document-length", "100", "--masked"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, program, folder, *words], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(folder, "train.safetensors"), "rb") as file:
                tokens = array.array("H", file.read()[-600:])
            with open(os.path.join(folder, "vocabulary.safetensors"), "rb") as file:
                self.assertIn(b"[PAD][UNK][CLS][SEP][MASK]<5><6><7><8>", file.read())
            for begin in (0, 100, 200):
                self.assertEqual((tokens[begin], tokens[begin + 99]), (2, 3))  # [CLS], [SEP]
                self.assertEqual(set(tokens[begin + 1 : begin + 99]), {5, 6, 7, 8})
            words[1] = "5"
            done = subprocess.run([sys.executable, program, folder, *words], capture_output=True, text=True)
            self.assertEqual(done.returncode, 64)
            self.assertIn("--vocab-size 5: --masked needs at least 6 ids", done.stderr)


# random_tokens.py with a small block of drawn ids.
SMALL_BLOCK = r"""
import os, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import random_tokens
random_tokens.BLOCK = 1000
random_tokens.main()
"""


class Shipped(unittest.TestCase):
    """What the programs would be started with, the configuration read first: later settings win."""

    def test_every_run_outlives_its_learning_rates_warm_up_and_keeps_its_batch(self):
        for name in SHIPPED:
            study = plan.load(os.path.join(ROOT, "slurm", "studies", name + ".yaml"), ROOT)
            for group in study.groups:
                for run in group.runs:
                    with self.subTest(f"{name}/{run.name}"):
                        values = configuration(study.config)
                        values.update(
                            word.split("=", 1) for word in study.arguments(group)[2:] + run.settings
                        )
                        self.assertGreater(
                            int(values["train.max_steps"]), int(values.get("lr_schedule.warmup_steps", 0))
                        )
                        parts = int(values.get("train.grad_accum_steps", 1))
                        if study.kind == "strong":
                            self.assertEqual(int(values["loader.global_batch_size"]) * parts, study.batch)
                        if study.kind == "weak":
                            self.assertEqual(
                                (int(values["train.batch_size"]) * parts, values["loader.global_batch_size"]),
                                (study.batch, "0"),
                            )

    def test_data_is_prepared_up_to_its_last_file(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in SHIPPED:
                for path, command in plan.load(
                    os.path.join(ROOT, "slurm", "studies", name + ".yaml"), ROOT
                ).prepare.items():
                    self.assertEqual(os.path.basename(path), "eval.safetensors")
                    self.assertIn(f"tools/random_tokens.py {os.path.dirname(path)} ", command)
            program = os.path.join(ROOT, "tools", "random_tokens.py")
            # It writes that one last: no file is later.
            done = subprocess.run(
                [sys.executable, "-c", REPLACED, program, folder, "--vocab-size", "9", "--tokens", "50"],
                capture_output=True,
                text=True,
            )
            self.assertEqual(
                done.stdout.split("\n")[-2], os.path.join(folder, "eval.safetensors"), done.stderr
            )


# Runs a program and prints in which order files got their names.
REPLACED = r"""
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
real, names = os.replace, []
os.replace = lambda part, path: (real(part, path), names.append(path))
runpy.run_path(sys.argv[0], run_name="__main__")
print(*names, sep="\n")
"""


def configuration(path):
    """{section.name: text} of a configuration."""
    import yaml

    def flat(node, prefix):
        if isinstance(node, dict):
            result = {}
            for name, child in node.items():
                result.update(flat(child, prefix + [str(name)]))
            return result
        return {".".join(prefix): str(node)}

    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return flat(yaml.safe_load(file), [])


class Golden(unittest.TestCase):
    maxDiff = None

    def test_shipped_studies_print_their_golden_jobs(self):
        self.assertEqual(sorted(name[:-4] for name in os.listdir(GOLDEN)), SHIPPED)
        for name in SHIPPED:
            with self.subTest(name):
                with open(os.path.join(GOLDEN, name + ".txt"), encoding="utf-8") as file:
                    self.assertEqual(dry_run(name), file.read())


def dry_run(name):
    texts = []
    for options in ([], ["--local", "--launcher", "mpirun"]):
        done = call(os.path.join("slurm", "studies", name + ".yaml"), "--dry-run", *options)
        if done.returncode != 0:
            return done.stderr
        # A sensitivity study has hundreds of local commands of one form: its last ones will do.
        lines = done.stdout.splitlines()
        texts += lines if not options else lines[-7:]
    return "\n".join(texts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for study_name in SHIPPED:
            with open(os.path.join(GOLDEN, study_name + ".txt"), "w", encoding="utf-8") as golden:
                golden.write(dry_run(study_name))
    else:
        unittest.main()
