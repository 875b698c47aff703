# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's own package reads what a run writes: python tensorboard_files.py <tensorboard_tool>. Exit
code 77: skipped."""

import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy
    import tensorboard_data_server
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.context import RequestContext
    from tensorboard.data import server_ingester
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.grpc_util import ChannelCredsType
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

TOOL = sys.argv.pop()


class EventFiles(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = os.path.join(temporary.name, "run")

    def train(self, done, last, every=10):
        subprocess.run([TOOL, os.path.dirname(self.folder), str(done), str(last), str(every)], check=True)

    def read(self):
        events = EventAccumulator(self.folder, size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        return events

    def read_fast(self):
        """{tag: its steps}, as TensorBoard reads them by default."""
        server = server_ingester.SubprocessServerDataIngester(
            server_binary=server_ingester.ServerBinary(
                tensorboard_data_server.server_binary(), tensorboard_data_server.__version__
            ),
            logdir=os.path.dirname(self.folder),
            reload_interval=1,
            channel_creds_type=ChannelCredsType.LOCAL,
        )
        server.start()
        runs = server.data_provider.read_scalars(
            RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
        )
        return {tag: [point.step for point in points] for tag, points in runs["run"].items()}

    def points(self, tag):
        return [(event.step, event.value) for event in self.read().Scalars(tag)]

    def rows(self, table):
        with open(os.path.join(self.folder, table + ".jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def assert_rows(self, tag, expected):
        """Values of event files are float32."""
        got = self.points(tag)
        self.assertEqual([step for step, _ in got], [step for step, _ in expected])
        numpy.testing.assert_array_equal(
            [value for _, value in got], numpy.array([float(value) for _, value in expected], numpy.float32)
        )

    def test_the_reader_gives_back_the_rows(self):
        self.train(0, 60, every=7)  # no row of steps at an epoch's end
        self.assert_rows("steps/loss", [(row["step"], row["loss"]) for row in self.rows("steps")])
        self.assert_rows("evals/eval_loss", [(row["step"], row["eval_loss"]) for row in self.rows("evals")])
        self.assert_rows(
            "epochs/test_accuracy",
            [(20 * (row["epoch"] + 1), row["test_accuracy"]) for row in self.rows("epochs")],
        )
        events = self.read()
        self.assertEqual(
            events.Tags()["scalars"],
            [
                "steps/loss",
                "steps/lr",
                "evals/eval_loss",
                "epochs/epoch_steps",
                "epochs/test_accuracy",
                "epochs/epoch_seconds",
                "epochs/samples_per_second",
            ],
        )
        self.assertEqual(
            [event.wall_time for event in events.Scalars("steps/loss")],
            [row["time"] for row in self.rows("steps")],
        )

    def test_settings_are_text_and_hparams(self):
        self.train(0, 10)
        events = self.read()
        text = events.Tensors("settings")[0].tensor_proto.string_val[0].decode()
        self.assertIn("| train.epochs | 2 epochs | changed |\n| model.name | resnet18 |  |\n", text)
        self.assertIn("| data.path | a\\|b |", text)
        self.assertEqual(events.SummaryMetadata("settings").plugin_data.plugin_name, "text")
        data = HParamsPluginData.FromString(
            events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        )
        hparams = {
            key: getattr(value, value.WhichOneof("kind"))
            for key, value in data.session_start_info.hparams.items()
        }
        self.assertEqual(
            hparams,
            {
                "train.epochs": 2.0,
                "model.name": "resnet18",
                "train.nesterov": True,
                "lr.lr": 0.05,
                "data.path": "a|b",
                "data.name": "inf",
                "data.title": "2 of 3",
            },
        )
        self.assertEqual(data.session_start_info.group_name, "run")

    def test_a_resumed_run_has_no_gap_and_no_double(self):
        self.train(0, 85, every=5)  # killed at 85, saved at 60
        self.train(60, 100)
        steps = [*range(5, 61, 5), *range(70, 101, 10)]
        self.assertEqual([step for step, _ in self.points("steps/loss")], steps)
        self.assertGreater(self.points("steps/loss")[-1][1], 60)  # of the second start
        self.assertEqual([step for step, _ in self.points("evals/eval_loss")], [10, 30, 50, 70, 90])
        self.assertEqual([step for step, _ in self.points("epochs/test_accuracy")], [20, 40, 60, 80, 100])

    def test_the_fast_loader_shows_no_double_if_rows_have_the_same_steps(self):
        self.train(0, 85)
        self.train(60, 100)
        tags = self.read_fast()
        self.assertEqual(tags["steps/loss"], [*range(10, 101, 10)])
        self.assertEqual(tags["evals/eval_loss"], [10, 30, 50, 70, 90])
        self.assertEqual(tags["epochs/test_accuracy"], [20, 40, 60, 80, 100])

    def test_a_cut_record_ends_its_file_alone(self):
        self.train(0, 40)
        (file,) = glob.glob(self.folder + "/events.*")
        with open(file, "r+b") as events:
            events.truncate(os.path.getsize(file) - 7)
        self.train(40, 60)
        self.assertEqual([step for step, _ in self.points("steps/loss")], [10, 20, 30, 40, 50, 60])

    def test_a_run_from_the_start_drops_everything(self):
        self.train(0, 40)
        self.train(0, 20)
        self.assertEqual([step for step, _ in self.points("steps/loss")], [10, 20])
        events = plugin_event_accumulator.EventAccumulator(self.folder, size_guidance={"tensors": 0})
        events.Reload()
        self.assertEqual(len(events.Tensors("settings")), 1)


if __name__ == "__main__":
    unittest.main()
