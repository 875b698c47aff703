# SPDX-License-Identifier: Apache-2.0
"""Run folders for the tests of tools/ddp_top.py."""

import json
import os
import socket
import time

from study_support import ToolTest

import ddp_top
from run_top import folder, view
from run_top.folder import Follower

HERE = socket.gethostname()


class NoGpus:
    def read(self):
        return []


def step_row(step, loss=None, more=None):
    row = {
        "step": step,
        "epoch": step / 50,
        "loss": 3 - step / 50 if loss is None else loss,
        "lr": 0.05,
        "step_ms": 100.0,
        "images_per_second": 640.0,
        "images_per_second_per_rank": 160.0,
        "exposed_comm_ms": 5.0,
        "loader_wait_ms": 1.0,
        "time": time.time() - 100 + step,
    }
    return json.dumps({**row, **(more or {})}) + "\n"


def rank_row(rank, exposed_ms=5.0, **more):
    return {
        "rank": rank,
        "step_ms": 100.0,
        "images_per_second": 160.0,
        "exposed_comm_ms": exposed_ms,
        "loader_wait_ms": 1.0,
        "memory_gib": 1.5,
        "host": f"n{rank // 2}",
        "device": "cpu",
        **more,
    }


class Top(ToolTest):
    def make_run(self, name="run", ranks=4, steps=range(10, 101, 10), max_steps=200, owner=None):
        self.write(f"{name}/settings.txt", "")
        self.write(f"{name}/steps.jsonl", "".join(map(step_row, steps)))
        rows = [rank_row(rank, exposed_ms=2.0 if rank == 2 else 8.0) for rank in range(ranks)]
        self.write(
            f"{name}/ranks.json",
            json.dumps({"time": 1.0, "step": 100, "max_steps": max_steps, "ranks": rows}),
        )
        self.write(
            f"{name}/log.txt", "".join(f"[12:00:{i:02}.000] [info] rank 0: line {i}\n" for i in range(40))
        )
        if owner is not None:
            self.own(owner, name)
        return os.path.join(self.folder, name)

    def own(self, owner, name="run"):
        record = {
            "host": HERE,
            "job": "77",
            "process": os.getpid(),
            "machine": folder.machine(),
            "start": "x",
            "ending": False,
            "beats": 1,
        }
        self.write(f"{name}/.owner", json.dumps({**record, **owner}).ljust(2047) + "\n")

    def read(self, path="run", nvml=None):
        return Follower(os.path.join(self.folder, path), nvml or NoGpus()).read()

    def top(self, *arguments, code=0):
        return self.call(ddp_top.main, *arguments, code=code)

    def draw(self, state, width, height, choice=None, is_ascii=False):
        lines = view.draw(state, width, height, choice, is_ascii)
        self.assertEqual(len(lines), height)
        rows = ["".join(text for text, _ in line) for line in lines]
        self.assertLessEqual(max(map(len, rows)), width)
        return rows
