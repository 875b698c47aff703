# SPDX-License-Identifier: Apache-2.0
"""The page of a report of cluster_check."""

import html.parser
import json
import re
import unittest

from study_support import ToolTest

import plot_check

GPU = "NVIDIA H200"


def check(name, low, median, high, verdict="pass", group="gpu", worst="", text="", threshold="at least 650"):
    return {
        "group": group,
        "name": name,
        "lowest": low,
        "median": median,
        "highest": high,
        "unit": "TFLOP/s",
        "threshold": threshold,
        "verdict": verdict,
        "worst": worst,
        "text": text,
    }


def row(rank, value, verdict="pass", text=""):
    return {
        "group": "gpu",
        "name": "gemm",
        "value": value,
        "unit": "TFLOP/s",
        "text": text,
        "rank": rank,
        "verdict": verdict,
    }


def point(operation, size, rate):
    rates = {"microseconds": 1234.5, "algbw_gb_per_s": rate / 2, "busbw_gb_per_s": rate}
    return {"operation": operation, "bytes": size, **rates}


def report(ranks=2, **more):
    hosts = [f"n{rank}" for rank in range(ranks)]
    return {
        "passed": True,
        "summary": "all checks passed: 3 thresholds are met",
        "started": "2026-11-26 23:03:25",
        "seconds": 121.4,
        "quick": False,
        "thresholds": "h200",
        "versions": "libddp 1 <2>",
        "ranks": [
            {
                "host": host,
                "local_rank": 0,
                "device": "cuda:0",
                "gpu": GPU,
                "launch": "mpirun",
                "backend": "nccl",
            }
            for host in hosts
        ],
        "checks": [check("gemm", 610, 650.5, 691)],
        "rows": [row(rank, 610.0 + rank) for rank in range(ranks)] + [row(-1, None, "n/a")],
        "collectives": [],
        "pairs": {"bytes": 0, "gb_per_s": []},
        "failures": [],
        **more,
    }


class Cells(html.parser.HTMLParser):
    """The tables as [[text of a cell]], and all text."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.text, self.in_cell = [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "img", "link", "iframe"), tag
        assert not {"src", "href"} & {name for name, _ in attrs}, attrs
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.tables[-1][-1][-1] += data


class PlotCheck(ToolTest):
    def page(self, content):
        self.write("r/report.json", json.dumps(content))
        self.assertEqual(self.call(plot_check.main, "r"), "page: r/report.html\n")
        return self.read("r/report.html")

    def test_checks_have_the_spread_of_the_ranks(self):
        worst = "rank 0 on n0, 6.2 % below the median"
        content = report(checks=[check("gemm", 610, 650.5, 691, "fail", worst=worst, text="burst 733")])
        content.update(passed=False, summary="1 row failed", failures=["gpu.gemm = 610 TFLOP/s: rank 0"])
        cells = Cells(self.page(content))
        self.assertEqual(
            cells.tables[0],
            [
                ["check", "lowest", "median", "highest", "unit", "threshold", "verdict", "worst", "details"],
                ["gemm", "610", "650.5", "691", "TFLOP/s", "at least 650", "FAIL", worst, "burst 733"],
            ],
        )
        for part in (
            "1 row failed.",
            "gpu.gemm = 610 TFLOP/s: rank 0",
            f"2 ranks on 2 nodes, {GPU}, communicator nccl, started by mpirun",
            "2026-11-26 23:03:25 UTC, 121 s. Thresholds: h200.",
            "libddp 1 <2>",
        ):
            self.assertIn(part, cells.text)
        self.assertEqual(
            cells.tables[-1][1:],
            [
                ["gpu.gemm", f"rank 0 (cuda:0, {GPU}) on node n0", "610", "TFLOP/s", "pass", ""],
                ["gpu.gemm", f"rank 1 (cuda:0, {GPU}) on node n1", "611", "TFLOP/s", "pass", ""],
                ["gpu.gemm", "all ranks", "n/a", "TFLOP/s", "n/a", ""],
            ],
        )

    def test_one_rank_has_one_column_of_values(self):
        checks = [
            check("gpus", 1, 1, 1, "unchecked", group="health", threshold=""),
            check("gemm", None, None, None, "n/a"),
        ]
        cells = Cells(self.page(report(ranks=1, checks=checks)))
        head = ["check", "value", "unit", "threshold", "verdict", "details"]
        self.assertEqual(cells.tables[0], [head, ["gpus", "1", "TFLOP/s", "", "no limit", ""]])
        self.assertEqual(cells.tables[1], [head, ["gemm", "n/a", "TFLOP/s", "at least 650", "n/a", ""]])
        self.assertIn("1 rank on 1 node", cells.text)

    def test_what_hosts_and_drivers_say_is_escaped(self):
        content = report(checks=[check("gemm", 1, 1, 1, text="a < b")])
        content["ranks"][0]["host"] = "<script>&"
        page = self.page(content)
        self.assertIn("&lt;script&gt;&amp;", page)
        self.assertIn("a &lt; b", page)
        self.assertIn("<script>&", Cells(page).text)  # refuses an element of that name

    def test_collectives_by_size(self):
        points = [point("all_reduce", 1 << power, 10.0 * power) for power in (10, 20, 24)]
        points += [point("all_gather", 1 << 10, 7.0), point("all_gather", 1 << 24, 0.0)]
        page = self.page(report(collectives=points))
        figure = re.search(r"<figure>.*</figure>", page)[0]
        # The rate 0 has no place on a logarithmic axis.
        self.assertEqual(
            re.findall(r"<title>(.*?)</title>", figure),
            [
                "all_reduce, 1024: 100",
                "all_reduce, 1.04858e+06: 200",
                "all_reduce, 1.67772e+07: 240",
                "all_gather, 1024: 7",
            ],
        )
        for label in ("1 KiB", "16 KiB", "4 MiB", "all_reduce", "bus bandwidth [GB/s]"):
            self.assertIn(f">{label}</" if label[0].isdigit() else label, figure)
        found = Cells(page).tables[1]
        self.assertEqual(found[0], ["operation", "bytes", "us", "algbw GB/s", "busbw GB/s"])
        self.assertEqual(found[2], ["all_reduce", "1,048,576", "1,234", "100", "200"])
        self.assertNotIn("<figure>", self.page(report(collectives=points[:1])))

    def test_slow_pairs_are_darker(self):
        content = report(ranks=2, pairs={"bytes": 4 << 20, "gb_per_s": [[0, 40], [20, 0]]})
        page = self.page(content)
        self.assertEqual(Cells(page).tables[1], [["", "0", "1"], ["0", "–", "40"], ["1", "20", "–"]])
        self.assertIn("4 MiB", page)
        self.assertIn('rgba(214,39,40,0.00)">40<', page)
        self.assertIn('rgba(214,39,40,0.30)">20<', page)

    def test_reports_that_cannot_be_used(self):
        whole = report()
        for text in (
            "",
            "[]",
            "{}",
            json.dumps({**whole, "ranks": []}),
            json.dumps({**whole, "rows": [row(2, 1.0)]}),
            json.dumps({**whole, "seconds": "long"}),
            json.dumps(
                {**whole, "collectives": [point("all_reduce", 8, 1.0), point("all_reduce", 9, 1e999)]}
            ),
        ):
            self.write("bad/report.json", text)
            printed = self.call(plot_check.main, "bad", code=65)
            self.assertIn("bad/report.json: not a report of this cluster_check", printed)
        self.assertIn("none/report.json", self.call(plot_check.main, "none", code=65))
        self.write("r/report.json", json.dumps(whole))
        self.call(plot_check.main, "r", "--output", "r/no/page.html", code=73)
        self.call(plot_check.main, code=64)


if __name__ == "__main__":
    unittest.main()
