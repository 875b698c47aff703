# SPDX-License-Identifier: Apache-2.0
"""tools/ddp_top.py: what it draws on screens of several sizes, and what --doctor asks whom and prints."""

import json
import os
import subprocess
import sys
import time
import unittest
from unittest import mock

from top_support import Top

from run_top import doctor, view

# Rank 0: writes a report when it is asked.
ANSWERING = """
import json, os, signal, sys
def answer(*_):
    with open("new.json", "w") as file:
        json.dump(json.loads(sys.argv[1]), file)
    os.replace("new.json", "doctor.json")
signal.signal(signal.SIGUSR2, answer)
print(flush=True)
while True:
    signal.pause()
"""

CALL = {
    "number": 12,
    "operation": "all_reduce (sum of 8 Float, 32 bytes)",
    "label": "bucket 4: a … b",
    "state": "started",
    "enqueued_ms": 31400,
}
REPORT = {
    "time": 1.0,
    "reason": "request",
    "verdict": {"kind": "absent", "certain": False, "ranks": [1], "text": "rank 1 (n1) did not enter it"},
    "ranks": [
        {
            "rank": 0,
            "host": "n0",
            "answered": True,
            "step": 5,
            "where": "backward",
            "communicators": [{"communicator": "world", "collectives": [{"state": "ended"}, CALL]}],
        },
        {
            "rank": 1,
            "host": "n1",
            "answered": True,
            "step": -1,
            "where": "save",
            "control_plane_call": "all_gather of 'save'",
            "communicators": [
                {
                    "communicator": "world",
                    "collectives": [CALL],
                    "graphs": [{"waited_ms": 2000, "collectives": [{**CALL, "number": 3}]}],
                }
            ],
        },
        {"rank": 2, "host": "n1", "answered": False, "silent_ms": 8100, "step": -3, "where": ""},
    ],
}


class Drawing(Top):
    def test_each_size(self):
        self.make_run(ranks=16, owner={})
        state = self.read()
        for width, height in ((80, 24), (200, 50), (40, 12), (20, 5), (1, 2)):
            rows = self.draw(state, width, height)
            self.draw(state, width, height, view.Choice(selected=15))
        rows = self.draw(state, 80, 24)
        text = "\n".join(rows)
        for part in (
            "RUNNING",
            "50.0 %  step 100/200",
            "ETA 00:00:10",
            "loss 1.0000",
            "100.0 ms/step",
            "640.0 images/s",
            "slowest rank 2 (n1): busy 98.0 of 100.0 ms, waits 2.00 ms for others",
            "rank",
            "busy ms",
            "line 39",
            "q quit",
        ):
            self.assertIn(part, text)
        self.assertIn("█", text)
        wide = "\n".join(self.draw(state, 200, 50))
        for part in ("NVLink MB/s", "SM MHz", "  host", "line 30"):
            self.assertIn(part, wide)
            self.assertNotIn(part, text)

    def test_ranks_that_are_slow(self):
        path = os.path.join(self.make_run(ranks=8, owner={}), "ranks.json")
        with open(path) as file:
            record = json.load(file)
        self.assertNotIn("slow since", "\n".join(self.draw(self.read(), 200, 50)))
        cause = "its loader made it wait 18.5 ms a step (others 0.0)"
        record["ranks"][2].update(slow_since_step=40, slow_because=cause)
        self.write("run/ranks.json", json.dumps(record))
        text = "\n".join(self.draw(self.read(), 200, 50))
        self.assertIn(f"rank 2 has been slow since step 40: {cause}", text)
        self.assertNotIn("rank 1 has been slow", text)
        for rank in record["ranks"]:
            rank.update(slow_since_step=40, slow_because=cause)
        self.write("run/ranks.json", json.dumps(record))
        text = "\n".join(self.draw(self.read(), 80, 24))
        for part in ("rank 1 has been slow", "and 6 more ranks", "busy ms"):
            self.assertIn(part, text)
        self.assertNotIn("rank 2 has been slow", text)

    def test_ranks_that_do_not_fit_follow_the_selected_one(self):
        self.make_run(ranks=100, owner={})
        rows = self.draw(self.read(), 80, 24, view.Choice(selected=70))
        self.assertIn("of 100 in this order", "\n".join(rows))
        self.assertTrue(any(row.startswith("   70 ") for row in rows))
        self.assertTrue(any(row.startswith("rank 70: n35 cpu") for row in rows))

    def test_the_curve(self):
        points = [(step, 10 - step) for step in range(10)]

        def rows(width, blocks=view.ASCII_BLOCKS):
            return ["".join(text for text, _ in line) for line in view.curve(points, width, 2, blocks)]

        self.assertEqual(rows(20), ["       10 #*+-.     ", "        1 ######*=-.", "          step 0   9"])
        self.assertEqual(rows(15)[:2], ["      9.5 #=.  ", "      1.5 ###+."])  # means of two
        flat = view.curve([(1, 2.0), (2, 2.0)], 12, 2, view.BLOCKS)
        self.assertEqual([line[1][0] for line in flat[:2]], ["  ", "██"])
        self.assertEqual(view.curve([(1, float("nan")), (2, 1.0)], 40, 2, view.BLOCKS), [])

    def test_a_curve_of_few_points_is_a_line_between_them(self):
        self.assertEqual(view.column_means([9, 1], 5), [9, 7, 5, 3, 1])
        self.assertEqual(view.column_means([0, 4, 2], 5), [0, 2, 4, 3, 2])
        self.assertEqual(view.column_means([4, 2], 2), [4, 2])
        self.assertEqual(view.column_means([4, 2, 0, 2], 2), [3, 1])
        lines = view.curve([(10, 3.0), (20, 1.0)], 18, 1, view.BLOCKS)
        self.assertEqual(lines[0][1][0], "█▇▆▅▄▃▂▁")

    def test_log_lines_are_wrapped(self):
        def rows(log, count, width=20):
            return [line[0][0] for line in view.log_lines(log, count, width)[1:]]

        log = ["old", "step 10 | loss 2.5 | rate 9 | ETA 00:00:20", "short"]
        whole = ["step 10 | loss 2.5 |", "    rate 9 | ETA", "    00:00:20", "short"]
        self.assertEqual(rows(log, 5), whole)
        self.assertEqual(rows(log, 6), ["old", *whole])
        self.assertEqual(rows(log, 4), ["short"])  # no line without its beginning
        self.assertEqual(rows(log[:2], 3), whole[1:3])  # unless it is the only one
        self.assertEqual(view.wrapped("a" * 25, 10), ["a" * 10, "    aaaaaa", "    aaaaaa", "    aaa"])
        self.assertEqual(view.wrapped("日本語", 4), ["日本", "語"])
        self.assertEqual(view.wrapped("日", 1), [""])
        style = view.log_lines(["[error] " + "x " * 20], 4, 20)
        self.assertEqual([line[0][1] for line in style], ["header", "bad", "bad", "bad"])
        self.make_run(owner={})
        self.write("run/log.txt", "[12:00:00] [info] " + " | ".join(f"part{i} 1.5" for i in range(12)) + "\n")
        for width, height in ((80, 24), (200, 50)):
            self.assertIn("part11 1.5", "\n".join(self.draw(self.read(), width, height)))

    def test_the_time_left_is_that_of_the_log(self):
        # The log rounds half a second up (llround).
        for seconds, text in ((10.5, "00:00:11"), (11.5, "00:00:12"), (11.4, "00:00:11")):
            self.assertEqual(view.duration(seconds), text)

    def test_the_column_of_the_order_is_marked(self):
        self.make_run(owner={})
        ranks = self.read().ranks

        def header(key, reverse, marks, width=200):
            lines = view.table(ranks, view.Choice(sort=key, reverse=reverse), width, None, marks=marks)
            return " " + lines[0][0][0]

        for column in view.COLUMNS:
            for reverse, mark, ascii_mark in ((False, "▲", "+"), (True, "▼", "-")):
                self.assertIn(f" {mark}{column.title}", header(column.key, reverse, view.ORDER_MARKS))
                text = header(column.key, reverse, view.ASCII_ORDER_MARKS)
                self.assertIn(f" {ascii_mark}{column.title}", text)
            # Also on a screen that is too narrow for this column without the order.
            self.assertIn(f"▲{column.title}", header(column.key, False, view.ORDER_MARKS, 40))
        self.assertIn("+rank", "\n".join(self.draw(self.read(), 80, 24, is_ascii=True)))
        self.assertIn("▲rank", "\n".join(self.draw(self.read(), 80, 24)))

    def test_the_order_of_a_host_goes_through_its_own_columns(self):
        choice, seen = view.Choice(), []
        records = [{"device": f"gpu:{index}", "utilisation_percent": 90} for index in range(2)]
        for _ in view.HOST_COLUMNS:
            choice.next_sort(view.HOST_COLUMNS, 200)
            text = "".join(part for line in view.draw_host(records, "h", 200, 20, choice) for part, _ in line)
            self.assertIn("▲", text)
            seen.append(choice.sort)
        self.assertEqual(sorted(seen), sorted(column.key for column in view.HOST_COLUMNS))

    def test_a_small_screen_keeps_the_ranks(self):
        self.make_run(owner={})
        rows = self.draw(self.read(), 60, 15, view.Choice(selected=3))
        self.assertTrue(any(row.startswith("    3 ") for row in rows), rows)
        self.assertTrue(any(row.startswith("rank 3: n1 cpu") for row in rows), rows)

    def test_wide_and_combining_characters(self):
        self.assertEqual((view.cells("a日ａ"), view.cells("e\u0301")), (5, 1))
        for text, width, kept in (
            ("日" * 80, 9, "日" * 4),
            ("e\u0301" * 5, 3, "e\u0301" * 3),
            ("a日", 3, "a日"),
            ("日", 0, ""),
        ):
            self.assertEqual(view.clipped([[(text, "dim")]], width), [[(kept, "dim")]])
        self.assertEqual(
            view.clipped([[("日日", "dim"), ("abc", "dim")]], 6), [[("日日", "dim"), ("ab", "dim")]]
        )

    def test_text_of_a_log_cannot_move_the_cursor(self):
        self.make_run(owner={})
        self.write("run/log.txt", "a\x1b[2Jb\tc\n")
        self.assertIn("a [2Jb c", "\n".join(self.draw(self.read(), 80, 24)))

    def test_keys(self):
        ranks = [{"rank": 0, "busy_ms": 5}, {"rank": 1, "busy_ms": 9}, {"rank": 2, "busy_ms": None}]
        choice = view.Choice(sort="busy_ms", reverse=True)
        self.assertEqual([rank["rank"] for rank in choice.sorted(ranks)], [1, 0, 2])  # unknown numbers last
        picked = []
        for distance in (1, 1, 1, 1, -1):
            choice.move(ranks, distance)
            picked.append(choice.selected)
        self.assertEqual(picked, [1, 0, 2, 2, 0])
        seen = set()
        for _ in range(20):
            choice.next_sort(view.COLUMNS, 80)
            seen.add(choice.sort)
        self.assertIn("step_ms", seen)
        self.assertNotIn("nvlink_mb_per_second", seen)  # a column that 80 columns leave out


class Doctor(Top):
    def start(self, program, *arguments):
        folder = os.path.join(self.folder, "run")
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=folder, stdout=subprocess.PIPE
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        child.stdout.readline()
        self.own({"process": child.pid})
        return child

    def test_it_asks_rank_0_and_prints_its_answer(self):
        self.make_run()
        self.write("run/doctor.json", json.dumps({"verdict": {"text": "an old one"}}))
        self.start(ANSWERING, json.dumps({**REPORT, "time": time.time()}))
        lines = self.top("run", "--doctor").splitlines()
        self.assertEqual(
            lines[:2], ["doctor: rank 1 (n1) did not enter it", "        (absent)"], "\n".join(lines)
        )
        self.assertEqual(
            lines[3:6],
            [
                "rank 0 (n0) at step 5 in backward; in all_reduce #12 (sum of 8 Float, 32 bytes), bucket 4: "
                "a … b since 31.4 s",
                "rank 1 (n1) before the first step in save; in the control plane's all_gather of 'save'; in "
                "all_reduce #3 (sum of 8 Float, 32 bytes), bucket 4: a … b since 2.0 s",
                "rank 2 (n1) at an unknown step, last seen 8.1 s ago: no answer",
            ],
        )
        self.assertIn("run/doctor.json (0 s old)", lines[-1])
        self.assertEqual(json.loads(self.top("run", "--doctor", "--json"))["verdict"], REPORT["verdict"])

    def test_a_run_that_has_ended_shows_the_report_that_it_left(self):
        self.make_run()
        self.assertIn("there is none, and the run has ended", self.top("run", "--doctor", code=65))
        self.write("run/doctor.json", json.dumps({**REPORT, "first_cause": "rank 0 failed"}))
        self.assertEqual(
            self.top("run", "--doctor").splitlines()[:3],
            ["first cause: rank 0 failed", "doctor: rank 1 (n1) did not enter it", "        (absent)"],
        )

    def test_a_terminal_cuts_no_word_and_obeys_no_report(self):
        words = "rank 1 (n1) did not enter all_reduce #12 (avg of 48 Float, 192 bytes; bucket 0: second.bias)"
        report = {**REPORT, "verdict": {"kind": "absent", "text": f"{words}; \x1b[2Jcode"}}
        lines = doctor.text_of("doctor.json", report, 2.0, 80).splitlines()
        self.assertEqual(" ".join(line.strip() for line in lines[:2]), f"doctor: {words};  [2Jcode")
        self.assertLessEqual(max(map(len, lines)), 80)
        self.assertNotIn("\x1b", doctor.text_of("doctor.json", report, 2.0))

    def test_whom_it_does_not_ask(self):
        self.make_run(owner={"host": "n9", "machine": "other", "process": 4711})
        self.assertIn("`kill -USR2 4711` on host n9", self.top("run", "--doctor", code=65))
        child = self.start("import time; print(flush=True); time.sleep(60)")  # the signal would end it
        self.assertIn("handles no SIGUSR2 and would end", self.top("run", "--doctor", code=65))
        self.assertIsNone(child.poll())
        child.kill()
        child.wait()
        self.assertIn("there is none, and the run has ended", self.top("run", "--doctor", code=65))
        self.own({"process": "x"})
        self.assertIn(".owner is damaged", self.top("run", "--doctor", code=65))
        self.assertIn("--doctor needs the folder of a run", self.top("--doctor", code=64))

    def test_a_killed_run_leaves_its_owners_record(self):
        self.make_run()
        self.write("run/doctor.json", json.dumps(REPORT))
        child = self.start(ANSWERING, json.dumps({"verdict": {"text": "of another process"}}))
        owner = os.path.join(self.folder, "run/.owner")
        os.utime(owner, (time.time() - 60,) * 2)  # before this process began: another one has the id
        self.assertIn("rank 1 (n1) did not enter it", self.top("run", "--doctor"))
        os.utime(owner)
        self.assertIn("of another process", self.top("run", "--doctor"))
        child.kill()
        child.wait()
        self.assertIn("of another process", self.top("run", "--doctor"))  # what it left

    def test_no_answer(self):
        self.make_run()
        self.start(ANSWERING.replace('os.replace("new.json", "doctor.json")', "pass"), json.dumps(REPORT))
        with mock.patch.object(doctor, "ANSWER_SECONDS", 0.3):
            self.assertIn("rank 0 wrote no report within 0.3 s", self.top("run", "--doctor", code=65))

    def test_damaged_reports(self):
        self.make_run()
        for text in ("", "{", "[]", '{"verdict": 1}'):
            self.write("run/doctor.json", text)
            self.assertIn("not a report of a run", self.top("run", "--doctor", code=65))
        for ranks in (None, 7, [1], [{}], [{"communicators": None}]):
            self.write("run/doctor.json", json.dumps({"verdict": {}, "ranks": ranks}))
            self.assertIn("doctor: ?", self.top("run", "--doctor"))


if __name__ == "__main__":
    unittest.main()
