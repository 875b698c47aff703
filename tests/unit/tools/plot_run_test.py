# SPDX-License-Identifier: Apache-2.0
"""The page of runs: which columns it draws, runs that were killed or resumed, several runs, and mistakes."""

import json
import os
import re
import unittest

from study_support import ToolTest

import plot_run
from run_page import chart, page
from run_page.files import Run

SETTINGS = """* train.epochs                                 2 epochs
  train.batch_size                             32 samples
* lr_schedule.lr                               {lr}
  checkpoint.dir                               
"""  # noqa: W291
STEPS = (
    "step,epoch,loss,accuracy,lr,grad_norm,step_ms,images_per_second,images_per_second_per_rank,exposed_comm_ms,"
    "loader_wait_ms,peak_memory_gib,interval_seconds,energy_j,time"
)
EPOCHS = (
    "job_id,commit,gpu_type,nodes,gpus,ranks,precision,global_batch_size,batch_size_per_gpu,bucket_cap_mb,repeat,"
    "steps_per_epoch,epoch,train_loss,train_accuracy,test_loss,test_accuracy,epoch_seconds,images_per_second,"
    "gpu_utilisation_percent,power_w,memory_gib,energy_j,time"
)


def step_row(step, loss=None, more=""):
    loss = loss or 3 - step / 50
    return f"{step},{step / 20},{loss},0.25,0.001,,100,320,160,10,5,2.5,1,,{1000 + step}{more}\n"


def epoch_row(epoch, steps_per_epoch="20", ranks=2, time=1020):
    begin = f",abc123,cpu,1,0,{ranks},fp32,32,16,25,1,{steps_per_epoch},{epoch}"
    return f"{begin},2.75,0.25,2.5,0.5,2,320,,,2.5,,{time + 20 * epoch}\n"


def legend(panel_text):
    return re.findall(r"</svg> ([^<]+)</span>", panel_text)


class Pages(ToolTest):
    def make_run(self, name, lr="0.001", steps=range(10, 41, 10), epochs=(0, 1)):
        self.write(f"{name}/settings.txt", SETTINGS.format(lr=lr))
        self.write(f"{name}/steps.csv", STEPS + "\n" + "".join(map(step_row, steps)))
        if epochs:
            self.write(f"{name}/epochs.csv", EPOCHS + "\n" + "".join(map(epoch_row, epochs)))
        return name

    def plot(self, *arguments, code=0):
        return self.call(plot_run.main, *arguments, code=code)

    def run_of(self, name):
        return Run(os.path.join(self.folder, name))

    def points(self, name, table, column):
        return next(
            points for source, known, points in self.run_of(name).series if (source, known) == (table, column)
        )

    def panels(self, page_text):
        """{title: text of its figure}"""
        figures = re.findall(r"<figure>.*?</figure>", page_text, re.DOTALL)
        return {re.search(r"<b>(.*?)</b>", figure)[1]: figure for figure in figures}

    def test_one_run(self):
        self.assertEqual(self.plot(self.make_run("a")), "page: a/run.html\n")
        text = self.read("a/run.html")
        for foreign in ("<script", "http", "src=", "url(", "@import"):
            self.assertNotIn(foreign, text)
        panels = self.panels(text)
        self.assertEqual(
            list(panels),
            [
                "loss",
                "accuracy",
                "learning rate",
                "throughput [images/s]",
                "throughput [images/s per rank]",
                "step and its parts [ms]",
                "memory [GiB]",
                "time of an epoch (epochs) [s]",
            ],
        )
        self.assertEqual(legend(panels["loss"]), ["loss", "train loss", "test loss"])
        self.assertEqual(legend(panels["learning rate"]), [])
        self.assertEqual(legend(panels["throughput [images/s]"]), ["throughput", "throughput (epochs)"])
        self.assertIn("<title>a, test loss, 20: 2.5</title>", panels["loss"])
        for part in (
            "<td class=text>steps</td><td class=text>loss</td><td>2.2 <small>[2.2 – 2.8]</small>",
            "<td class=text>commit</td><td class=text>abc123",
        ):
            self.assertIn(part, text)
        self.assertEqual(
            self.first_table(text),
            {
                "logged until": "40 steps",
                "loss": "2.2",
                "accuracy": "25.0 %",
                "evaluation loss": "2.5",
                "evaluation accuracy": "50.0 %",
                "throughput": "320 images/s",
                "exposed communication": "10.0 % of the step",
                "ranks": "2",
                "device": "cpu",
                "precision": "fp32",
                "global batch": "32",
                "first row (UTC)": "1970-01-01 00:16:50",
                "time to the last row": "0:00:30",
            },
        )
        changed, everything = text[text.index("<h2>Configuration") :].split("<details>")
        self.assertIn("<td class=text>lr_schedule.lr</td><td class=text>0.001", changed)
        self.assertNotIn("batch_size", changed)
        self.assertIn("<td class=text>train.batch_size</td><td class=text>32 samples", everything)

    def first_table(self, text, column=0):
        """{name: text of this run} of the first table."""
        rows = re.findall(r"<tr>(.*?)</tr>", text[text.index("<table>") : text.index("</table>")])
        cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[1:]]
        return {row[0]: row[1 + column] for row in cells}

    def test_the_first_table(self):
        self.make_run("a")
        self.write("a/evals.csv", "step,epoch,eval_loss,eval_accuracy\n40,2,1.5,0.375\n")
        self.write("b/steps.jsonl", '{"step":1,"mfu":0.25,"tokens_per_second":9}\n{"step":3,"mfu":0.5}\n')
        self.plot("a", "b")
        text = self.read("a/run.html")
        first = self.first_table(text)
        # Evaluations between epochs are newer than those at their ends.
        self.assertEqual((first["evaluation loss"], first["evaluation accuracy"]), ("1.5", "37.5 %"))
        self.assertEqual(first["MFU"], "–")
        second = self.first_table(text, column=1)
        known = {name: value for name, value in second.items() if value != "–"}
        self.assertEqual(known, {"logged until": "3 steps", "throughput": "9 tokens/s", "MFU": "37.5 %"})

    def test_the_system_table(self):
        self.make_run("s/a", epochs=())
        record = {"host": "node7", "gpu_type": "NVIDIA H200", "device": "cuda", "LibTorch": "2.11.0"}
        record |= {"CUDA": "13.0", "NCCL": "2.28.9", "driver": "580.1", "ranks": 2}
        self.write("s/a/run.json", json.dumps({**record, "command": "train --config <x>"}))

        def table():
            text = self.read(self.make_page("s/a")).partition("<h2>System</h2>")[2]
            return list(self.first_table(text).items())

        expected = [
            ("host", "node7"),
            ("CPU", "–"),
            ("device", "NVIDIA H200"),
            ("NVIDIA driver", "580.1"),
            ("LibTorch", "2.11.0"),
            ("CUDA", "13.0"),
            ("NCCL", "2.28.9"),
            ("command", "train --config &lt;x&gt;"),
            ("ranks", "2"),
        ]
        self.assertEqual(table(), expected)
        # An older run.json lacks what SYSTEM.md and command.txt of a study know.
        self.write(
            "s/SYSTEM.md", "| | |\n|---|---|\n| CPU | EPYC |\n| NVIDIA driver | 5 |\n| LibTorch | 1 |\n"
        )
        self.write("s/a/command.txt", "srun train\n")
        expected[1] = ("CPU", "EPYC")
        self.assertEqual(table(), expected)
        del record["driver"], record["LibTorch"]
        self.write("s/a/run.json", json.dumps(record))
        expected[3:5] = [("NVIDIA driver", "5"), ("LibTorch", "1")]
        expected[7] = ("command", "srun train")
        self.assertEqual(table(), expected)

    def test_sums_over_intervals_are_drawn_per_second(self):
        header = "step,loss,interval_seconds,energy_j\n"
        self.write("a/steps.csv", header + "10,1,2,600\n20,1,3,900\n30,1,,\n")
        panels = self.panels(self.read(self.make_page("a")))
        self.assertEqual(list(panels), ["loss", "power [W]"])
        self.assertEqual(self.points("a", "steps", "power_w"), [(10, 300), (20, 300)])
        self.assertEqual(self.points("a", "steps", "energy_j"), [(10, 600), (20, 900)])  # of Values

    def test_own_metrics_have_a_section_and_share_charts(self):
        names = "d_loss,g_loss,kl,accuracy@1,accuracy@5,score/real,score/fake,top_1,x_ms,y_gib"
        values = ",".join(["1"] * (1 + names.count(",")))
        self.write("a/steps.csv", f"step,loss,{names}\n10,3,{values}\n20,3,{values}\n")
        self.write("a/evals.csv", "step,eval_loss,eval_recall,train_recall\n20,3,1,2\n")
        self.write("a/samples.csv", "step,loss\n20,3\n")
        text = self.read(self.make_page("a"))
        sections = dict(re.findall(r"<h2>([^<]*)</h2>(.*?)(?=<h2>|$)", text, re.DOTALL))
        self.assertEqual(list(self.panels(sections["Curves"])), ["loss"])
        own = self.panels(sections["Own metrics"])
        self.assertEqual(list(own), ["loss", "kl", "accuracy", "score", "top 1", "recall"])
        self.assertEqual(legend(own["loss"]), ["d loss", "g loss", "loss (samples)"])
        self.assertEqual(legend(own["accuracy"]), ["accuracy@1", "accuracy@5"])
        self.assertEqual(legend(own["score"]), ["score/real", "score/fake"])
        self.assertEqual(legend(own["recall"]), ["eval recall", "train recall"])
        self.assertEqual(list(self.panels(sections["Time of a step"])), ["step and its parts [ms]"])
        self.assertEqual(list(self.panels(sections["Resources"])), ["y [GiB]"])

    def test_far_values_have_marks(self):
        losses = {40: 14.25, 41: 3}
        self.write(
            "a/steps.csv",
            "step,loss\n"
            + "".join(f"{step},{losses.get(step, 0.1 + step / 1e4)}\n" for step in range(1, 101)),
        )
        self.write("a/evals.csv", "step,eval_loss\n50,0.105\n")
        panel = self.panels(self.read(self.make_page("a")))["loss"]
        self.assertIn("<small>▲ 2 above, up to 14.25</small>", panel)
        self.assertEqual(panel.count("z"), 2)  # arrows
        self.assertIn("<title>a, loss, 40: 14.25</title>", panel)
        self.assertIn("<title>a, eval loss, 50: 0.105</title></circle>", panel)
        heights = [
            float(y)
            for y in re.findall(r"[ML][\d.]+ (-?[\d.]+)(?=[L\"])", panel.partition("</figcaption>")[2])
        ]
        self.assertGreaterEqual(min(heights), chart.TOP)

    def test_columns_and_files_of_the_user(self):
        self.make_run("a")
        self.write(
            "a/steps.csv",
            STEPS
            + ",d_loss,note,fid_<x>,tokens_per_second\n"
            + step_row(10, more=",1,text,0.5,9")
            + step_row(20, more=",2,text,nan,8"),
        )
        self.write("a/samples.jsonl", '{"quality":1,"step":10}\n{"quality":3,"step":20,"other":true}\n')
        self.write("a/notes.csv", "name,value\nx,1\n")
        self.assertEqual(
            self.plot("a", "--title", "A & B"),
            "note: a: steps.csv: fid_<x> is not finite in 1 of 2 rows, first at step 20\npage: a/run.html\n",
        )
        text = self.read("a/run.html")
        self.assertIn("<title>A &amp; B</title>", text)
        panels = self.panels(text)
        self.assertLessEqual({"d loss", "fid &lt;x&gt;", "throughput [tokens/s]", "quality"}, set(panels))
        self.assertEqual(self.points("a", "samples", "quality"), [(10, 1), (20, 3)])
        for absent in ("note", "other", "value", "time"):
            self.assertNotIn(absent, panels)

    def test_several_runs(self):
        self.make_run("a")
        self.make_run("b", lr="0.1")
        self.plot("a", "b", "--output", "out/both.html")
        text = self.read("out/both.html")
        differ = text[text.index("<h2>Settings that differ") : text.index("<h2>Curves")]
        self.assertIn(
            "<td class=text>lr_schedule.lr</td><td class=text>0.001</td><td class=text>0.1</td>", differ
        )
        self.assertEqual(differ.count("<tr>"), 2)
        self.assertEqual(self.first_table(text)["loss"], self.first_table(text, column=1)["loss"])
        loss = self.panels(text)["loss"]
        self.assertEqual(legend(loss), ["a", "b", "loss", "train loss", "test loss"])
        lines = re.findall(
            r'class="line" stroke="(#\w+)" stroke-dasharray="([^"]+)" opacity="1"',
            loss[loss.index("</figcaption>") :],
        )
        self.assertEqual(len(set(lines)), 6)
        self.assertEqual([color for color, _ in lines], [chart.PALETTE[0]] * 3 + [chart.PALETTE[1]] * 3)
        self.assertNotIn("Settings that differ between", self.read(self.make_page("a")))

    def make_page(self, name):
        self.plot(name)
        return f"{name}/run.html"

    def test_more_runs_than_colours_stay_apart(self):
        pens = [chart.pen(index) for index in range(len(chart.PALETTE) + 2)]
        self.assertEqual(len(set(pens)), len(pens))

    def test_runs_of_one_name_are_called_by_their_paths(self):
        self.plot(self.make_run("x/r"), self.make_run("y/r"), "--output", "out.html")
        self.assertIn("<h1>x/r, y/r</h1>", self.read("out.html"))

    def test_a_killed_run(self):
        self.make_run("a", epochs=())
        with open(os.path.join(self.folder, "a/steps.csv"), "a", encoding="utf-8") as file:
            file.write(step_row(50)[:-2])  # has all its cells, but not all digits of the last
        self.assertEqual(
            self.plot("a"),
            "note: a: steps.csv: lines that cannot be read are left out: 6\npage: a/run.html\n",
        )
        self.assertEqual([x for x, _ in self.points("a", "steps", "loss")], [10, 20, 30, 40])
        # Resumed, its next line continues the cut one.
        with open(os.path.join(self.folder, "a/steps.csv"), "a", encoding="utf-8") as file:
            file.write(step_row(50) + step_row(60))
        self.assertIn("left out: 6\n", self.plot("a"))
        self.assertEqual([x for x, _ in self.points("a", "steps", "loss")], [10, 20, 30, 40, 60])

    def test_a_killed_run_with_jsonl_alone(self):
        self.write(
            "a/steps.jsonl",
            '{"step":1,"loss":3}\n[1]\n{"step":2,"loss":"nan"}\n{"step":3,"loss":2}\n'
            '{"step":3,"l{"step":4,"loss":1}\n{"step":5,"lo',
        )
        self.assertIn("steps.jsonl: lines that cannot be read are left out: 2, 5, 6\n", self.plot("a"))
        self.assertEqual(self.points("a", "steps", "loss"), [(1, 3), (3, 2)])

    def test_a_file_that_ends_inside_a_character(self):
        self.write("a/samples.jsonl", '{"step":1,"quality":3}\n')
        with open(os.path.join(self.folder, "a/samples.jsonl"), "ab") as file:
            file.write('{"step":2,"text":"ä'.encode()[:-1])
        self.assertEqual(
            self.plot("a"),
            "note: a: samples.jsonl: lines that cannot be read are left out: 2\npage: a/run.html\n",
        )
        self.assertEqual(self.points("a", "samples", "quality"), [(1, 3)])

    def test_times_that_are_no_seconds_are_not_used(self):
        for time in ("1700000000000", "-1", "NaN", "1" + 400 * "0"):
            self.write(
                "a/samples.jsonl",
                '{"step":1,"quality":3,"time":%s}\n{"step":2,"quality":4,"time":1020}\n' % time,
            )
            self.assertEqual(self.run_of("a").times, [1020], time)
            self.assertEqual(self.plot("a"), "page: a/run.html\n")

    def test_numbers_that_are_too_large_are_not_finite(self):
        for low, high in (("-1e308", "1.7e308"), ("-1" + 400 * "0", "1" + 400 * "0")):
            self.write(
                "a/samples.jsonl",
                '{"step":1,"quality":%s}\n{"step":2,"quality":%s}\n{"step":3,"quality":-1e300}\n'
                '{"step":4,"quality":1e300}\n' % (low, high),
            )
            self.assertIn(
                "samples.jsonl: quality is not finite in 2 of 4 rows, first at step 1\n", self.plot("a")
            )
            self.assertEqual(self.points("a", "samples", "quality"), [(3, -1e300), (4, 1e300)])

    def test_numbers_that_are_too_small_are_0(self):
        self.write("a/samples.jsonl", '{"step":0,"quality":0}\n{"step":1,"quality":5e-324}\n')
        self.assertEqual(self.plot("a"), "page: a/run.html\n")
        self.assertEqual(self.points("a", "samples", "quality"), [(0, 0), (1, 0)])

    def test_a_fact_may_be_0(self):
        self.write(
            "a/epochs.jsonl", '{"gpu_type":"","gpus":0,"ranks":2,"nodes":null,"epoch":0,"test_loss":2.5}\n'
        )
        self.assertEqual(self.run_of("a").facts, {"gpus": "0", "ranks": "2"})

    def test_a_run_without_epochs_has_its_constants(self):
        self.make_run("a", epochs=())
        self.write(
            "a/run.json",
            json.dumps(
                {"ranks": 2, "batch_size_per_gpu": 16.0, "libddp": "0.1.0", "started": 1e9, "x": None}
            ),
        )
        constants = {"ranks": "2", "batch_size_per_gpu": "16", "libddp": "0.1.0"}
        self.assertEqual(self.run_of("a").facts, constants)
        self.plot("a")
        system = self.read("a/run.html").partition("<h2>System</h2>")[2]
        self.assertIn(">libddp</td>", system)
        self.assertIn(">0.1.0</td>", system)
        self.write("a/run.json", '{"ranks": 2')  # damaged
        self.assertEqual(self.run_of("a").facts, {})

    def test_constants_of_a_later_start_replace_those_of_the_last_epoch(self):
        self.make_run("a")  # epochs of 2 ranks, the last one at 1040 s
        for started, ranks in ((1030, "2"), (1050, "4")):
            self.write("a/run.json", json.dumps({"ranks": 4, "program": "train", "started": started}))
            facts = self.run_of("a").facts
            self.assertEqual((facts["ranks"], facts["program"], facts["precision"]), (ranks, "train", "fp32"))

    def test_equal_constants_have_equal_texts(self):
        self.make_run("a", epochs=())
        self.make_run("b", epochs=())
        constants = {"batch_size_per_gpu": 16.0, "bucket_cap_mb": 1234567.5}
        self.write("a/run.json", json.dumps(constants))
        self.write("b/epochs.jsonl", json.dumps({**constants, "epoch": 0, "test_loss": 2.5}) + "\n")
        self.assertEqual(self.run_of("a").facts, {"batch_size_per_gpu": "16", "bucket_cap_mb": "1234567.5"})
        self.assertEqual(self.run_of("b").facts, self.run_of("a").facts)

    def test_of_csv_and_jsonl_the_one_with_more_rows_counts(self):
        self.make_run("a")
        for rows, loss in ((4, 7), (3, 2.8)):
            self.write(
                "a/steps.jsonl",
                "".join(
                    json.dumps({"step": step, "loss": 7}) + "\n" for step in range(10, 10 * rows + 1, 10)
                ),
            )
            self.assertEqual(self.points("a", "steps", "loss")[0][1], loss)

    def test_where_a_resumed_run_went_back_its_later_rows_count(self):
        self.make_run("a")
        self.write(
            "a/steps.csv",
            STEPS
            + "\n"
            + "".join(
                step_row(step, loss) for step, loss in ((10, 1), (20, 2), (30, 3), (20, 4), (30, 5), (30, 6))
            ),
        )
        self.assertEqual(self.points("a", "steps", "loss"), [(10, 1), (20, 4), (30, 6)])

    def test_epochs_lie_at_their_ends(self):
        self.make_run("a", steps=range(10, 36, 5))  # ends inside the second epoch
        self.assertEqual([x for x, _ in self.points("a", "epochs", "test_loss")], [20, 35])
        # Without their length: at the step that was logged last before them.
        self.write("a/epochs.csv", EPOCHS + "\n" + epoch_row(0, "", time=1018) + epoch_row(1, "", time=1018))
        self.assertEqual([x for x, _ in self.points("a", "epochs", "test_loss")], [15, 35])
        os.remove(os.path.join(self.folder, "a/steps.csv"))
        self.assertEqual([x for x, _ in self.points("a", "epochs", "test_loss")], [0, 1])
        self.assertIn(">epoch</text>", self.read(self.make_page("a")))

    def test_parts_of_a_step(self):
        self.make_run("a")
        self.assertEqual(
            page.parts(self.run_of("a")),
            {"step": 100, "exposed communication": 10, "data wait": 5, "the rest": 85},
        )
        self.assertIn("10 ms <small>10.0 %</small>", self.read(self.make_page("a")))
        self.write(
            "a/steps.csv",
            STEPS + ",forward_ms\n" + "".join(step_row(step, more=f",{step}") for step in (10, 20, 90)),
        )
        self.assertEqual(page.parts(self.run_of("a"))["forward"], 20)
        self.write("a/steps.csv", "step,loss\n1,2\n")
        self.assertEqual(page.parts(self.run_of("a")), {})

    def test_smoothing(self):
        self.assertEqual(chart.smoothed([(1, 4), (2, 6), (3, 11)], 2), [(1, 4), (2, 5), (3, 8.5)])
        self.plot(self.make_run("a"), "--smooth", "3")
        loss = self.panels(self.read("a/run.html"))["loss"]
        self.assertEqual(loss.count('opacity="0.25"'), 1)  # of the steps, and not of the epochs
        self.assertIn("means of the last 3 rows", self.read("a/run.html"))

    def test_what_a_study_left_is_shown(self):
        self.make_run("s/a")
        self.write("s/a/command.txt", "mpirun -n 2 program a<b\n")
        self.write("s/SYSTEM.md", "# abacus\n\n| | |\n|---|---|\n| memory | 5 GiB |\n")
        self.plot("s/a")
        for part in (
            "mpirun -n 2 program a&lt;b",
            "<h3>abacus</h3>",
            "<table><tr><td class=text>memory</td>",
        ):
            self.assertIn(part, self.read("s/a/run.html"))

    def test_the_latest_run(self):
        for age, name in enumerate(("runs/new", "runs/old", "elsewhere/only")):
            for file in os.scandir(os.path.join(self.folder, self.make_run(name))):
                os.utime(file.path, (10_000 - age, 10_000 - age))
        os.makedirs(os.path.join(self.folder, "runs/study"))
        self.assertEqual(self.plot("--latest"), "page: runs/new/run.html\n")
        os.utime(os.path.join(self.folder, "runs/old/steps.csv"))
        self.assertEqual(self.plot("--latest", "runs", "elsewhere"), "page: runs/old/run.html\n")
        self.assertIn("<title>old, only</title>", self.read("runs/old/run.html"))
        self.assertEqual(self.plot("runs/new", "--latest"), "page: runs/new/run.html\n")
        self.assertIn("none: there is no such folder", self.plot("--latest", "none", code=65))
        self.assertIn("no run is in it", self.plot("--latest", "runs/study", code=65))

    def test_mistakes(self):
        self.make_run("runs/a")
        for path in ("none", "runs/a/steps.csv"):
            self.assertIn(f"{path}: there is no such folder", self.plot(path, code=65))
        self.assertIn(
            "runs: not the folder of a run: no CSV or JSONL file in it has a column step or epoch; fix: name "
            "a run in it: a\n",
            self.plot("runs", code=65),
        )
        for header in ("", STEPS + "\n", STEPS + "\n1,0.1,2"):
            self.write("new/steps.csv", header)
            self.write("new/epochs.csv", EPOCHS + "\n")
            self.assertIn("new: the run has logged nothing yet; fix: wait", self.plot("new", code=65))
        self.write("newest/settings.txt", SETTINGS)
        self.assertIn("newest: the run has logged nothing yet", self.plot("newest", code=65))
        os.makedirs(os.path.join(self.folder, "bad/steps.csv"))
        self.assertIn("bad/steps.csv: cannot be read: Is a directory; fix:", self.plot("bad", code=65))
        with open(os.path.join(self.folder, "new/steps.csv"), "wb") as file:
            file.write(b"step,loss\n1,\xff\n")
        self.assertIn("new/steps.csv:2: not UTF-8 text: byte 0xff; fix:", self.plot("new", code=65))
        self.assertIn("usage", self.plot(code=64))
        for rows in ("0", "some"):
            self.assertIn("--smooth", self.plot("runs/a", "--smooth", rows, code=64))
        for output in ("runs", "runs/a/steps.csv/x.html"):
            self.assertRegex(
                self.plot("runs/a", "--output", output, code=73),
                r"error: runs\S*: cannot write: .*; fix: name another",
            )


if __name__ == "__main__":
    unittest.main()
