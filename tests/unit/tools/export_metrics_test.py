# SPDX-License-Identifier: Apache-2.0
"""What tools/export_metrics.py hands to wandb and mlflow, by modules that record the calls; and mistakes."""

import json
import os
import sys
import unittest
from unittest import mock

from study_support import ToolTest

import export_metrics

SETTINGS = "* train.epochs                 2 epochs\n  model.name                   resnet18\n"
# A package of that name that prints its calls into calls.jsonl. Sets what export_metrics reads of results.
FAKE = """
import json
def note(*call):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")
"""
WANDB = (
    FAKE
    + """
class Run:
    dir = "wandb/offline-run-1/files"
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish")
def init(**options):
    note("init", options)
    return Run()
"""
)
MLFLOW = (
    FAKE
    + """
from types import SimpleNamespace
class entities:
    Metric = staticmethod(lambda *parts: parts)
    Param = staticmethod(lambda *parts: parts)
class MlflowClient:
    def __init__(self, uri): note("store", uri)
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): note("experiment", name); return "7"
    def create_run(self, experiment, run_name, start_time):
        note("run", experiment, run_name, start_time)
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    def log_batch(self, run_id, metrics=(), params=()): note("batch", run_id, metrics, params)
    def set_terminated(self, run_id, end_time): note("end", run_id, end_time)
"""
)


class Export(ToolTest):
    def setUp(self):
        super().setUp()
        self.write("run/settings.txt", SETTINGS)
        self.write("run/run.json", '{"precision": "bf16", "ranks": 1, "started": 100.5}\n')
        self.write(
            "run/steps.jsonl",
            '{"step": 10, "loss": 2.5, "time": 110.5}\n{"step": 20, "loss": "nan", "pairs@5": 3, "time": '
            "120}\n",
        )
        self.write(
            "run/epochs.jsonl",
            '{"ranks": 2, "steps_per_epoch": 20, "epoch": 0, "test_accuracy": 0.5, "time": 121}\n',
        )

    def export(self, *arguments, code=0, **modules):
        """With packages of these names and texts."""
        for name, text in modules.items():
            self.write(f"packages/{name}.py", text)
        for name in ("wandb", "mlflow"):
            sys.modules.pop(name, None)
        # Import then raises ImportError.
        missing = {name: None for name in ("wandb", "mlflow") if name not in modules}
        with (
            mock.patch.dict(sys.modules, missing),
            mock.patch.object(sys, "path", [os.path.join(self.folder, "packages"), *sys.path]),
        ):
            return self.call(export_metrics.main, *arguments, code=code)

    def calls(self):
        return [json.loads(line) for line in self.read("calls.jsonl").splitlines()]

    def test_wandb(self):
        text = self.export("run", "--to", "wandb", "--project", "p", "--output", "out", wandb=WANDB)
        self.assertIn("run: wandb sync wandb/offline-run-1\n", text)
        self.assertIn("note: run: steps.jsonl: loss is not finite in 1 of 2 rows, first at step 20", text)
        begin, first, second, end = self.calls()
        settings = {"train.epochs": "2 epochs", "model.name": "resnet18"}
        constants = {"run/precision": "bf16", "run/ranks": "2", "run/steps_per_epoch": "20"}
        self.assertEqual(begin[1]["config"], {**settings, **constants})
        self.assertEqual(
            (begin[1]["mode"], begin[1]["project"], begin[1]["name"], begin[1]["dir"]),
            ("offline", "p", "run", "out"),
        )
        self.assertEqual(first, ["log", 10, {"steps/loss": 2.5, "_timestamp": 110.5}])
        self.assertEqual(second[:2], ["log", 20])  # the epoch's row has the same step
        self.assertTrue(second[2].pop("steps/loss") != 0)  # NaN
        self.assertEqual(second[2], {"steps/pairs@5": 3, "epochs/test_accuracy": 0.5, "_timestamp": 121})
        self.assertEqual(end, ["finish"])

    def test_mlflow(self):
        text = self.export("run", "--to", "mlflow", "--project", "p", mlflow=MLFLOW)
        self.assertRegex(
            text, r"run: mlflow ui --backend-store-uri sqlite:///\S+/mlflow.db    \(experiment p, run r1\)"
        )
        store, experiment, run, metrics, params, end = self.calls()
        self.assertEqual(
            (experiment, run, end), (["experiment", "p"], ["run", "7", "run", 110500], ["end", "r1", 121000])
        )
        self.assertEqual(metrics[2][0], ["steps/loss", 2.5, 110500, 10])
        self.assertEqual(
            metrics[2][2:], [["steps/pairs_5", 3.0, 120000, 20], ["epochs/test_accuracy", 0.5, 121000, 20]]
        )
        self.assertEqual(params[3][:2], [["train.epochs", "2 epochs"], ["model.name", "resnet18"]])
        self.assertIn(["run/precision", "bf16"], params[3])
        text = self.export("run", "--to", "mlflow", "--tracking-uri", "http://host:5000", mlflow=MLFLOW)
        self.assertTrue(text.startswith("run: sending to http://host:5000\n"), text)
        self.assertEqual(self.calls()[6], ["store", "http://host:5000"])

    def test_long_runs_go_in_parts(self):
        self.write(
            "run/steps.jsonl",
            "".join(f'{{"step": {step}, "loss": 1, "time": {step}}}\n' for step in range(2500)),
        )
        self.export("run", "--to", "mlflow", mlflow=MLFLOW)
        self.assertEqual(
            [len(call[2]) for call in self.calls() if call[0] == "batch" and call[2]], [1000, 1000, 501]
        )

    def test_a_missing_package(self):
        for target in ("wandb", "mlflow"):
            text = self.export("run", "--to", target, code=64)
            self.assertRegex(
                text, rf"error: --to {target} needs the package {target} \(.*\); fix: pip install {target}\n$"
            )

    def test_the_target_refuses(self):
        refusal = (
            "class Refusal(Exception): pass\nRefusal.__module__ = '{}'\n"
            "def refuse(*arguments, **options): raise Refusal('no')\n{} = refuse\n"
        ).format
        for module in ("mlflow.exceptions", "sqlalchemy.exc", "requests.exceptions"):
            self.assertIn(
                "error: run: mlflow refused the run: no; fix: name another --project, --output or "
                "--tracking-uri\n",
                self.export(
                    "run",
                    "--to",
                    "mlflow",
                    code=73,
                    mlflow=MLFLOW + refusal(module, "MlflowClient.create_experiment"),
                ),
            )
        self.assertIn(
            "error: run: wandb refused the run: no; fix: name another --project or --output\n",
            self.export("run", "--to", "wandb", code=73, wandb=WANDB + refusal("wandb.errors", "init")),
        )
        with self.assertRaisesRegex(Exception, "no"):  # our own mistakes keep their traceback
            self.export("run", "--to", "wandb", wandb=WANDB + refusal("export_metrics", "init"))

    def test_an_unreachable_server_is_not_tried_for_minutes(self):
        for given, used in (({}, "2"), ({export_metrics.MLFLOW_RETRIES: "5"}, "5")):
            with mock.patch.dict(os.environ, given):
                if not given:
                    os.environ.pop(export_metrics.MLFLOW_RETRIES, None)
                self.export("run", "--to", "mlflow", mlflow=MLFLOW)
                self.assertEqual(os.environ[export_metrics.MLFLOW_RETRIES], used)

    def test_mistakes(self):
        self.assertIn(
            "none: there is no such folder", self.export("none", "--to", "wandb", code=65, wandb=WANDB)
        )
        for arguments in (("run",), ("--to", "wandb"), ("run", "--to", "excel")):
            self.assertIn("usage", self.export(*arguments, code=64))
        self.assertIn(
            "--tracking-uri u is for --to mlflow; fix: leave it out",
            self.export("run", "--to", "wandb", "--tracking-uri", "u", code=64),
        )
        self.write("file", "")
        self.assertIn(
            "cannot write", self.export("run", "--to", "wandb", "--output", "file/x", code=73, wandb=WANDB)
        )
        os.makedirs(os.path.join(self.folder, "taken/mlflow.db"))
        self.assertIn(
            "taken/mlflow.db: cannot write: Is a directory",
            self.export("run", "--to", "mlflow", "--output", "taken", code=73, mlflow=MLFLOW),
        )


if __name__ == "__main__":
    unittest.main()
