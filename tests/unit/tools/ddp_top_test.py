# SPDX-License-Identifier: Apache-2.0
"""The live view: what it reads of a run folder, whether a run lives, and mistakes."""

import json
import os
import subprocess
import sys
import time
import unittest
from unittest import mock

from study_support import ROOT
from top_support import HERE, NoGpus, Top, rank_row, step_row

import ddp_top
from run_top import folder, gpus, view
from run_top.folder import Follower, Owner


class Reading(Top):
    def test_a_running_run(self):
        self.make_run(owner={"process": os.getpid()})
        state = self.read()
        self.assertEqual((state.status, state.reason), ("running", ""))
        self.assertEqual((state.step, state.max_steps, state.rate, state.unit), (100, 200, 640.0, "images"))
        self.assertAlmostEqual(state.eta_seconds, 10)
        self.assertEqual(state.owner, f"host {HERE}, job 77, process {os.getpid()}")
        self.assertEqual(state.slowest_rank, 2)
        self.assertEqual([rank["busy_ms"] for rank in state.ranks], [92, 92, 98, 92])
        self.assertEqual(state.log[-1], "[12:00:39.000] [info] rank 0: line 39")

    def test_a_killed_run_is_dead(self):
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            child.wait()
            self.make_run(owner={"process": child.pid})
        state = self.read()
        self.assertEqual(state.status, "dead")
        self.assertIn(
            f"killed after step 100 of 200: host {HERE}, job 77, process {child.pid} no longer runs",
            state.reason,
        )
        self.assertIsNone(state.eta_seconds)

    def test_an_owner_on_another_host_lives_while_it_counts(self):
        owner = Owner(self.make_run(owner={"host": "n9", "machine": "other"}))
        self.assertIsNone(owner.read(0)[1])
        self.assertIsNone(owner.read(9)[1])
        self.assertIs(owner.read(10)[1], False)
        self.own({"host": "n9", "machine": "other", "beats": 2})
        self.assertIs(owner.read(11)[1], True)
        self.assertIs(owner.read(20.9)[1], True)
        self.assertIs(owner.read(21)[1], False)
        os.remove(os.path.join(self.folder, "run/.owner"))
        self.assertEqual(owner.read(30), (None, None))

    def test_a_damaged_record_of_the_owner(self):
        path = self.make_run(owner={})
        follower = Follower(path, NoGpus())
        follower.read()
        for text in ("", "{", "[1]"):  # being written
            self.write("run/.owner", text)
            self.assertEqual(follower.read().status, "running")
            self.assertEqual(self.read().status, "unknown")
            self.own({})
            self.assertEqual(follower.read().status, "running")
        for process in (0, "text", None):
            self.own({"process": process})
            with (
                mock.patch.object(folder, "WATCH_SECONDS", 0.05),
                mock.patch.object(ddp_top, "LOOK_SECONDS", 0.02),
            ):
                self.assertEqual(json.loads(self.top("run", "--json"))["status"], "dead")
        self.write("run/.owner", "{")
        with (
            mock.patch.object(folder, "WATCH_SECONDS", 0.05),
            mock.patch.object(ddp_top, "LOOK_SECONDS", 0.02),
        ):
            self.assertIn(
                "killed after step 100 of 200: an owner whose record .owner is damaged",
                self.top("run", "--once"),
            )

    def test_files_that_vanish_between_two_calls(self):
        path = self.make_run(owner={})
        with mock.patch.object(os.path, "exists", lambda path: True):
            for name in ("steps.jsonl", ".owner", "ranks.json", "log.txt"):
                os.remove(os.path.join(path, name))
            state = self.read()
        self.assertEqual((state.status, state.step, state.ranks, state.log), ("ended", None, [], []))

    def test_a_finished_run_and_one_that_ended_earlier(self):
        self.make_run(max_steps=100)
        self.assertEqual(self.read().status, "finished")
        self.make_run(max_steps=200)
        self.assertEqual(
            (self.read().status, self.read().reason),
            ("ended", "after step 100 of 200: stopped, failed, or without more steps"),
        )
        self.make_run(steps=())
        self.assertEqual(self.read().reason, "before the first row: stopped, failed, or without more steps")

    def test_a_run_without_rows_for_long_is_quiet(self):
        self.make_run(steps=range(1, 60), owner={"beats": 50})
        state = self.read()
        self.assertEqual(state.status, "quiet")
        self.assertIn("no row for 41 s (usual: 1 s): an evaluation, a save, or a hang", state.reason)

    def test_rows_of_an_earlier_start_do_not_make_a_resumed_run_quiet(self):
        self.make_run(steps=range(1, 60), owner={"beats": 15})
        self.assertEqual((self.read().status, self.read().reason), ("running", "no row since this start"))
        self.own({"beats": 16})
        self.assertEqual(
            (self.read().status, self.read().reason),
            (
                "quiet",
                "no row since this start, about 32 s ago (usual: 1 s): an evaluation, a save, or a hang",
            ),
        )

    def test_a_run_that_has_logged_nothing(self):
        self.write("run/settings.txt", "")
        self.own({})
        state = self.read()
        self.assertEqual(
            (state.status, state.reason, state.step, state.ranks), ("running", "no row yet", None, [])
        )
        self.assertIn("slowest rank -", "\n".join(self.draw(state, 80, 24)))

    def test_only_what_was_added_is_read_again(self):
        path = self.make_run()
        follower = Follower(path, NoGpus())
        follower.read()
        with open(os.path.join(path, "steps.jsonl"), "a", encoding="utf-8") as file:
            file.write(step_row(110)[:-5])
            file.flush()
            self.assertEqual(follower.read().step, 100)  # an unfinished line
            file.write(step_row(110)[-5:] + step_row(90, loss=7) + "damaged\n")
        state = follower.read()
        self.assertEqual((state.step, state.loss), (90, 7))  # a resumed run went back
        self.assertEqual(len(state.losses), 9)
        self.write("run/new", step_row(20))
        os.replace(os.path.join(path, "new"), os.path.join(path, "steps.jsonl"))  # written again
        self.assertEqual([step for step, _ in follower.read().losses], [20])

    def test_only_the_last_rows_are_kept_whole(self):
        path = self.make_run(steps=range(1, 101))
        follower = Follower(path, NoGpus())
        self.assertEqual([step for step, _ in follower.read().losses], list(range(1, 101)))
        self.assertEqual([row["step"] for row in follower._steps.rows], list(range(81, 101)))
        with open(os.path.join(path, "steps.jsonl"), "a", encoding="utf-8") as file:
            # Further back than the rows that are kept.
            file.write(step_row(50, loss=7) + '{"step": 50, "accuracy": 0.5}\n')
        state = follower.read()
        self.assertEqual(
            (state.step, state.loss, state.accuracy, len(state.losses), state.losses[-1]),
            (50, 7, 0.5, 50, (50, 7)),
        )

    def test_damaged_files(self):
        path = self.make_run(owner={})
        for text in (
            '{"ranks": [1]}',
            '{"ranks": null}',
            '{"ranks": {"rank": 1}}',
            '{"ranks": [{"step_ms": 1}, {"rank": "x"}]}',
            "[" * 100000,
        ):
            self.write("run/ranks.json", text)
            self.assertEqual(self.read().ranks, [], text[:50])
        row = {
            "rank": 1,
            "step_ms": "fast",
            "exposed_comm_ms": [1],
            "host": 5,
            "busy_ms": "nan",
            "device": "gpu:0",
        }
        self.write("run/ranks.json", json.dumps({"max_steps": "many", "ranks": [row, {**row, "rank": 2}]}))
        state = self.read()
        self.assertEqual([rank["rank"] for rank in state.ranks], [1, 2])
        self.assertNotIn("host", state.ranks[0])
        self.draw(state, 200, 50, view.Choice(selected=1))
        self.write(
            "run/steps.jsonl",
            step_row(10) + '{"step": 1e999}\n{"step": "nan", "loss": 1}\n' + "[" * 100000 + "\n",
        )
        self.assertEqual((self.read().step, len(self.read().losses)), (10, 1))
        os.remove(os.path.join(path, "steps.jsonl"))
        self.write("run/steps.csv", "step,loss\n10,0.5\n20," + "1" * 140000 + "\n")
        self.assertEqual(self.read().step, 10)

    def test_a_run_with_csv_alone(self):
        path = self.make_run()
        os.remove(os.path.join(path, "steps.jsonl"))
        self.write("run/steps.csv", "step,loss,grad_norm,tokens_per_second\n10,0.5,,8\n20,nan,,9\n30")
        state = self.read()
        self.assertEqual((state.step, state.grad_norm, state.unit, state.rate), (20, None, "tokens", 9))
        self.draw(state, 80, 24)  # a NaN is not drawn

    def test_a_programs_own_metrics(self):
        self.make_run(owner={})
        self.write(
            "run/steps.jsonl",
            step_row(
                10, more={"d_loss": 0.25, "words_per_second": 1520.5, "mfu": 0.415, "tflops_per_rank": 1}
            ),
        )
        self.write("run/evals.jsonl", '{"step":10,"epoch":0.2,"eval_loss":2.5,"top5":0.75,"time":1}\n')
        state = self.read()
        self.assertEqual(state.custom, {"d_loss": 0.25, "words_per_second": 1520.5})
        self.assertEqual(state.evaluation, {"step": 10, "epoch": 0.2, "eval_loss": 2.5, "top5": 0.75})
        text = "\n".join(self.draw(state, 80, 24))
        for part in ("d_loss 0.25  words/s 1520.5", "MFU 41.5 %", "eval loss 2.5000  top5 0.7500"):
            self.assertIn(part, text)
        os.remove(os.path.join(self.folder, "run/evals.jsonl"))
        epoch = {
            "ranks": 2,
            "epoch": 0,
            "epoch_steps": 4,
            "images_per_second": 9.0,
            "test_loss": 2.5,
            "top5": 0.5,
        }
        self.write("run/epochs.jsonl", json.dumps(epoch) + "\n")
        self.assertEqual(self.read().evaluation, {"epoch": 0, "test_loss": 2.5, "top5": 0.5})

    def test_the_constants_of_a_run(self):
        self.make_run(owner={}, steps=())
        self.assertEqual(self.read().constants, {})
        os.remove(os.path.join(self.folder, "run/ranks.json"))
        record = {"ranks": 2, "nodes": 1, "gpu_type": "NVIDIA H200", "precision": "bf16", "num_steps": 300}
        self.write("run/run.json", json.dumps({**record, "libddp": "0.1.0 (commit abc)", "program": "train"}))
        state = self.read()
        self.assertEqual(state.max_steps, 300)  # before the first row
        self.assertIn(
            "2 ranks on 1 node, NVIDIA H200, bf16, train, libddp 0.1.0 (commit abc)",
            "\n".join(self.draw(state, 100, 24)),
        )
        rows = self.draw(state, 60, 24)
        self.assertIn("    (commit abc)", rows)  # a narrow screen wraps it

    def test_the_last_evaluation(self):
        self.make_run()
        self.assertEqual(self.read().evaluation, {})
        self.write(
            "run/epochs.jsonl",
            json.dumps({"ranks": 4, "epoch": 1, "test_loss": 0.5, "test_accuracy": 0.75, "power_w": 1})
            + "\n",
        )
        self.assertEqual(self.read().evaluation, {"epoch": 1, "test_loss": 0.5, "test_accuracy": 0.75})
        self.assertIn(
            "at the end of epoch 1: test loss 0.5000  test accuracy 75.0 %",
            "\n".join(self.draw(self.read(), 80, 24)),
        )
        self.write(
            "run/evals.jsonl", json.dumps({"step": 90, "epoch": 1.8, "eval_loss": 0.25, "time": 5}) + "\n"
        )
        self.assertIn("at step 90: eval loss 0.2500", "\n".join(self.draw(self.read(), 80, 24)))

    def test_gpus_of_this_host_are_fresh(self):
        path = self.make_run()
        rows = [
            rank_row(0, host=HERE, pci_bus_id="0000:65:00.0", temperature_c=1),
            rank_row(1, host="n9", pci_bus_id="0000:65:00.0"),
        ]
        self.write("run/ranks.json", json.dumps({"ranks": rows}))
        nvml = mock.Mock(
            read=lambda: [
                {"device": "gpu:0", "pci_bus_id": "00000000:65:00.0", "temperature_c": 61, "power_w": 400}
            ]
        )
        state = Follower(path, nvml).read()
        self.assertEqual(
            [(rank.get("temperature_c"), rank.get("power_w")) for rank in state.ranks],
            [(61, 400), (None, None)],
        )
        self.assertEqual(state.ranks[0]["device"], "cpu")
        self.assertFalse(gpus.same_bus_id("0000:65:00.0", "00000001:65:00.0"))
        self.assertEqual(gpus.Nvml("libmissing.so").read(), [])


class Calls(Top):
    def test_once_and_json(self):
        self.make_run(owner={})
        text = self.top("run", "--once", "--ascii")
        self.assertIn("RUNNING", text)
        self.assertTrue(text.isascii())
        record = json.loads(self.top("run", "--json"))
        self.assertEqual(
            (record["status"], record["step"], record["slowest_rank"], len(record["ranks"])),
            ("running", 100, 2, 4),
        )

    def test_the_newest_run_of_a_folder(self):
        self.make_run("runs/old")
        self.make_run("runs/new")
        os.utime(os.path.join(self.folder, "runs/new/log.txt"), (time.time() + 60, time.time() + 60))
        self.assertEqual(json.loads(self.top("runs", "--json"))["run"], "runs/new")

    def test_a_newer_run_is_shown_once_the_last_one_ended(self):
        self.make_run("runs/1", owner={})
        source = ddp_top.Run(os.path.join(self.folder, "runs"))
        self.make_run("runs/2")
        os.utime(os.path.join(self.folder, "runs/2/log.txt"), (time.time() + 60, time.time() + 60))
        self.assertEqual(os.path.basename(source.read().run), "1")
        os.remove(os.path.join(self.folder, "runs/1/.owner"))
        self.assertEqual(os.path.basename(source.read().run), "2")

    def test_numbers_that_json_lacks(self):
        self.make_run(steps=(10,))
        self.write("run/steps.jsonl", step_row(10, more={"loss": "nan", "lr": 1e30, "grad_norm": "inf"}))

        def refuse(name):
            raise AssertionError(f"{name} is not JSON")

        record = json.loads(self.top("run", "--json"), parse_constant=refuse)
        self.assertEqual((record["loss"], record["lr"], record["grad_norm"]), ("nan", 1e30, "nan"))

    def program(self, *arguments, **options):
        return subprocess.run(
            [
                sys.executable,
                os.path.join(ROOT, "tools/ddp_top.py"),
                os.path.join(self.folder, "run"),
                *arguments,
            ],
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            **options,
        )

    def test_an_output_that_takes_no_more(self):
        self.make_run()
        for arguments in (["--once"], ["--json"]):
            with open("/dev/full", "wb") as full:
                done = self.program(*arguments, stdout=full)
            self.assertEqual(
                (done.returncode, done.stderr.decode()),
                (
                    73,
                    "error: standard output: cannot write: No space left on device; fix: make room there, or "
                    "name another file\n",
                ),
            )
            reader, writer = os.pipe()
            os.close(reader)
            done = self.program(*arguments, stdout=writer)
            os.close(writer)
            self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_characters_that_the_encoding_lacks(self):
        self.make_run()
        self.write("run/log.txt", "日本\n")
        done = self.program(
            "--once",
            stdout=subprocess.PIPE,
            env={"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        )
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertIn(b"\n??\n", done.stdout)

    def test_once_waits_until_a_distant_owner_counts(self):
        self.make_run(owner={"host": "n9", "machine": "other"})
        with (
            mock.patch.object(folder, "WATCH_SECONDS", 0.05),
            mock.patch.object(ddp_top, "LOOK_SECONDS", 0.02),
        ):
            self.assertEqual(json.loads(self.top("run", "--json"))["status"], "dead")

    def test_this_host(self):
        records = [{"device": "gpu:0", "gpu_type": "H100", "utilisation_percent": 97, "temperature_c": 61}]
        with (
            mock.patch.object(ddp_top, "Nvml", lambda: mock.Mock(read=lambda: records)),
            mock.patch.object(ddp_top, "LOOK_SECONDS", 0),
        ):
            text = self.top("--once")
            self.assertRegex(text, r"0 +gpu:0 +97 +- ")
            self.assertEqual(json.loads(self.top("--json")), {"host": HERE, "gpus": records})

    def test_mistakes(self):
        self.assertIn(
            "none: there is no such folder, or no right to read it; fix: name the folder",
            self.top("none", "--once", code=65),
        )
        os.makedirs(os.path.join(self.folder, "empty"))
        self.assertIn(
            "empty: not the folder of a run, and no run is in it", self.top("empty", "--once", code=65)
        )
        with mock.patch.object(ddp_top, "Nvml", NoGpus):
            self.assertIn(
                "this host has no GPU that NVIDIA's driver reports; fix: name the folder of a run",
                self.top("--once", code=65),
            )
        self.make_run()
        for interval in ("0", "-1", "nan", "soon"):
            self.assertIn("--interval", self.top("run", "--interval", interval, code=64))
        self.assertIn("the live view needs a terminal; fix: add --once", self.top("run", code=64))
        self.write("run/steps.jsonl", "")
        os.remove(os.path.join(self.folder, "run/steps.jsonl"))
        os.makedirs(os.path.join(self.folder, "run/steps.jsonl"))
        self.assertIn("run/steps.jsonl: cannot be read: Is a directory", self.top("run", "--once", code=65))

    def in_terminal(self, term):
        """(exit code, output) of curses itself in a pseudo-terminal of 80 x 24: keys, then q."""
        import pty

        self.make_run(owner={})
        process, terminal = pty.fork()
        if process == 0:
            os.environ.update(TERM=term, LINES="24", COLUMNS="80", LC_ALL="C.UTF-8")
            os.execv(
                sys.executable,
                [sys.executable, os.path.join(ROOT, "tools/ddp_top.py"), os.path.join(self.folder, "run")],
            )
        output = b""
        keys = b"srjjq"
        try:
            while chunk := os.read(terminal, 65536):
                output += chunk
                if keys and b"q quit" in output:
                    os.write(terminal, keys)
                    keys = b""
        except OSError:  # the terminal closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), output.decode("utf-8", "replace")

    def test_the_screen_in_a_terminal(self):
        for term in ("xterm-256color", "xterm", "vt100"):
            code, output = self.in_terminal(term)
            self.assertEqual(code, 0, output)
            self.assertIn("RUNNING", output)
        code, output = self.in_terminal("unheard-of")
        self.assertEqual(code, 64, output)
        self.assertIn(
            "TERM=unheard-of is a terminal that curses does not know; fix: set TERM=xterm, or add --once",
            output,
        )


if __name__ == "__main__":
    unittest.main()
