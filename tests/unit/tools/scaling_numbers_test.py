# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of studies, without pandas or matplotlib. Values are exact in binary where compared with
==."""

import glob
import json
import os
import re
import tempfile
import unittest

from study_support import EPOCH_COLUMNS, ROOT, STEP_COLUMNS, write_csv, write_run

from scaling import numbers


class Definitions(unittest.TestCase):
    def test_shares_have_one_decimal(self):
        shares = (0, 0.0004, 0.1004, 0.75, 0.9996, 1)
        texts = ["0.0 %", "0.0 %", "10.0 %", "75.0 %", "100.0 %", "100.0 %"]
        self.assertEqual([numbers.percent(share) for share in shares], texts)
        self.assertEqual(numbers.percent(0.125, ""), "12.5")
        # No tool formats a share in another way.
        for path in glob.glob(os.path.join(ROOT, "tools/**/*.py"), recursive=True):
            with open(path, encoding="utf-8") as file:
                found = re.findall(r".*(?:%\}|\d?f\} ?%|100 \* [\w.]+:).*", file.read())
            expected = (
                ['    return f"{100 * share:.1f}{unit}"'] if path.endswith("scaling/numbers.py") else []
            )
            self.assertEqual(found, expected, path)

    def test_strong_efficiency_is_time_saved_over_gpus_spent(self):
        self.assertEqual(numbers.strong_efficiency(800, 4, 200), 1.0)
        self.assertEqual(numbers.strong_efficiency(800, 4, 400), 0.5)
        # The smallest point has 2 GPUs: from 2 to 4 GPUs in half the time is perfect.
        self.assertEqual(numbers.strong_efficiency(400, 4, 200, base_ranks=2), 1.0)

    def test_weak_efficiency_is_the_rate_of_a_gpu(self):
        self.assertEqual(numbers.weak_efficiency(100, 4, 400), 1.0)
        self.assertEqual(numbers.weak_efficiency(100, 4, 300), 0.75)
        self.assertEqual(numbers.weak_efficiency(200, 8, 600, base_ranks=2), 0.75)

    def test_speed_up(self):
        self.assertEqual(numbers.speed_up(800, 200), 4)

    def test_bottleneck_is_the_longest_wait_from_a_tenth_of_the_step(self):
        self.assertEqual(numbers.bottleneck(100, 9.9, 9.9), "compute")
        self.assertEqual(numbers.bottleneck(100, 10, 0), "communication")
        self.assertEqual(numbers.bottleneck(100, 0, 10), "input")
        self.assertEqual(numbers.bottleneck(100, 20, 30), "input")
        self.assertEqual(numbers.bottleneck(100, 30, 20), "communication")
        self.assertEqual(numbers.bottleneck(100, None, None), "compute")

    def test_spread_is_the_median_with_extremes(self):
        spread = numbers.spread([5, 1, 2, None])
        self.assertEqual((spread.median, spread.low, spread.high, spread.count), (2, 1, 5, 3))
        self.assertIsNone(numbers.spread([None]))
        # A falling function turns the ends around.
        turned = numbers.spread([1, 2, 4]).map(lambda value: 8 / value)
        self.assertEqual((turned.median, turned.low, turned.high), (4, 2, 8))


class Runs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()

    def read(self, name="run", warmup=10):
        return numbers.read_run(self.folder, name, warmup)

    def test_warm_up_does_not_count(self):
        write_run(self.folder, "run", ranks=2, step_ms=125, energy_j=24, exposed_ms=20, wait_ms=2)
        run = self.read()
        self.assertEqual(run.step_ms, 125)
        self.assertEqual(run.rate, 48 * 8)
        self.assertEqual((run.ranks, run.repeat, run.unit), (2, 1, "image"))
        # 24 J in 10 steps of 48 images.
        self.assertEqual(run.joules_per_unit, 24 / 480)
        self.assertEqual(run.epoch_seconds, 12.5)
        self.assertEqual(run.bottleneck, "communication")
        self.assertEqual(run.memory_gib, 2.5)

    def test_an_interval_that_begins_in_the_warm_up_is_left_out(self):
        write_run(self.folder, "run", ranks=1, step_ms=125)
        self.assertGreater(self.read(warmup=9).step_ms, 0)
        # Warm-up 5: the interval that ends at step 10 began at 0, so it is out, as with 10.
        self.assertEqual(self.read(warmup=5).step_ms, 125)

    def test_intervals_weigh_by_their_time(self):
        # 10 steps of 100 ms and 30 steps of 300 ms: 10 s for 40 steps and 400 images.
        write_run(self.folder, "run", ranks=1, step_ms=1)
        write_csv(
            os.path.join(self.folder, "run", "steps.csv"),
            STEP_COLUMNS,
            [
                [10, 0, 5, 1, 0, 0, 1, 1, 1],
                [20, 0, 100, 100, 0, 4, 1, 1, 10],
                [50, 0, 300, 100 / 3, 0, 8, 1, 9, 30],
            ],
        )
        run = self.read()
        self.assertAlmostEqual(run.step_ms, 250)
        self.assertAlmostEqual(run.rate, 40)
        self.assertAlmostEqual(run.loader_wait_ms, 7)
        self.assertAlmostEqual(run.joules_per_unit, 0.1)

    def test_tokens_are_a_unit_too(self):
        write_run(self.folder, "run", ranks=1, step_ms=125)
        path = os.path.join(self.folder, "run", "steps.csv")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("images_per_second", "tokens_per_second"))
        self.assertEqual(self.read().unit, "token")

    def test_a_run_without_epochs_has_its_constants_from_run_json(self):
        write_run(self.folder, "run", ranks=2, step_ms=125)
        expected = self.read()
        os.remove(os.path.join(self.folder, "run", "epochs.csv"))
        self.fails("epochs.csv: cannot be read")
        path = os.path.join(self.folder, "run", "run.json")
        record = {"ranks": 2, "nodes": 1, "repeat": 1, "precision": "fp32", "global_batch_size": 48}
        record |= {"gpu_type": "cpu", "job_id": "7", "commit": "abc", "steps_per_epoch": 100}
        for text in (json.dumps({**record, "bucket_cap_mb": 25}), "[]", "{"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            if text.startswith("{") and text != "{":
                self.assertEqual(self.read(), expected)
            else:
                self.fails("run.json: not a JSON object")

    def test_null_in_run_json_is_an_empty_text(self):
        write_run(self.folder, "run", ranks=2, step_ms=125)
        os.remove(os.path.join(self.folder, "run", "epochs.csv"))
        with open(os.path.join(self.folder, "run", "run.json"), "w", encoding="utf-8") as file:
            json.dump({"ranks": 2, "precision": None, "global_batch_size": None, "bucket_cap_mb": 25.0}, file)
        run = self.read()
        self.assertEqual((run.precision, run.global_batch_size, run.bucket_cap_mb), ("", None, "25"))

    def test_constants_of_a_later_start_replace_those_of_the_last_epoch(self):
        write_run(self.folder, "run", ranks=2, step_ms=125)
        path = os.path.join(self.folder, "run", "epochs.csv")
        with open(path, encoding="utf-8") as file:
            header, *rows = file.read().splitlines()
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{header},time\n" + "".join(f"{row},{1000.5}\n" for row in rows))
        expected = self.read()
        # The constants of one start are taken together: the other start may have had other GPUs.
        last = (2, expected.precision, expected.commit, expected.gpu_type)
        for started, constants in ((1000, last), (1001, (4, "bf16", "", ""))):
            with open(os.path.join(self.folder, "run", "run.json"), "w", encoding="utf-8") as file:
                json.dump({"ranks": 4, "precision": "bf16", "commit": "", "started": started}, file)
            run = self.read()
            self.assertEqual((run.ranks, run.precision, run.commit, run.gpu_type), constants)
        with open(os.path.join(self.folder, "run", "run.json"), "w", encoding="utf-8") as file:
            file.write("{")  # damaged
        self.assertEqual(self.read(), expected)

    def test_texts_of_constants(self):
        for value, text in (
            (16.0, "16"),
            ("16", "16"),
            (100000.0, "100000"),
            ("1e+05", "100000"),  # of a CSV file
            (1234567.5, "1234567.5"),
            (0.1, "0.1"),
            (1e300, "1e+300"),
            (float("inf"), "inf"),
            (None, ""),
            ("12e4567", "12e4567"),  # a commit
        ):
            self.assertEqual(numbers.constant_text(value), text)

    def test_mfu_weighs_intervals_by_their_time(self):
        write_run(self.folder, "run", ranks=1, step_ms=125)
        self.assertIsNone(self.read().mfu)
        path = os.path.join(self.folder, "run", "steps.csv")
        with open(path, encoding="utf-8") as file:
            header, *rows = file.read().splitlines()
        shares = [0.875, *[0.25] * (len(rows) - 1)]  # the first row is warm-up
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{header},mfu\n" + "".join(f"{row},{mfu}\n" for row, mfu in zip(rows, shares)))
        self.assertEqual(self.read().mfu, 0.25)

    def test_unknown_energy_is_no_energy(self):
        write_run(self.folder, "run", ranks=1, step_ms=125)
        self.assertIsNone(self.read().joules_per_unit)

    def fails(self, message, warmup=10):
        with self.assertRaisesRegex(numbers.DataError, message):
            self.read(warmup=warmup)

    def test_bad_files_are_named(self):
        self.fails(r"run/steps\.csv: cannot be read")
        write_run(self.folder, "run", ranks=1, step_ms=125)
        self.fails(r"run/steps\.csv: no logging interval follows the 50 steps", warmup=50)
        steps = os.path.join(self.folder, "run", "steps.csv")
        for column in ("step_ms", "interval_seconds", "energy_j", "exposed_comm_ms", "loader_wait_ms"):
            columns = [name if name != column else "other" for name in STEP_COLUMNS]
            write_csv(steps, columns, [[10] + [1] * 8])
            self.fails(rf"run/steps\.csv: the column {column} is missing; the file has step")
        write_csv(steps, [name.replace("images", "apples") for name in STEP_COLUMNS], [[10] + [1] * 8])
        self.fails(
            r"run/steps\.csv: there is no throughput column; one of tokens_per_second, images_per_second"
        )
        write_csv(steps, STEP_COLUMNS, [[10] + [1] * 7])
        self.fails(r"run/steps\.csv:2: 8 cells below 9 columns")
        write_csv(steps, STEP_COLUMNS, [[10] + [1] * 8, [20, 0, "fast"] + [1] * 6])
        self.fails(r"run/steps\.csv:3: step_ms is 'fast', not a number")
        write_csv(steps, STEP_COLUMNS, [])
        self.fails(r"run/steps\.csv: there are no rows below the header")
        open(steps, "w", encoding="utf-8").close()
        self.fails(r"run/steps\.csv: the file is empty")
        write_run(self.folder, "run", ranks=1, step_ms=125)
        write_csv(
            os.path.join(self.folder, "run", "epochs.csv"),
            EPOCH_COLUMNS[:-1],
            [[1] * (len(EPOCH_COLUMNS) - 1)],
        )
        self.fails(r"run/epochs\.csv: the column gpu_utilisation_percent is missing")


class Points(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()

    def points(self, kind, times, batch_of):
        runs = []
        for ranks, milliseconds in times.items():
            for repeat, step_ms in enumerate(milliseconds, 1):
                name = f"n{ranks:03d}_r{repeat}"
                write_run(self.folder, name, ranks, step_ms, repeat, batch=batch_of(ranks))
                runs.append(numbers.read_run(self.folder, name, 10))
        return numbers.make_points(runs, kind)

    def test_strong(self):
        one, four = self.points("strong", {1: [1000, 800, 900], 4: [300, 250, 450]}, lambda ranks: 48)
        self.assertEqual(one.step_ms.median, 900)
        self.assertAlmostEqual(four.speed_up.median, 3)
        self.assertAlmostEqual(four.efficiency.median, 0.75)
        # Against the median of one rank: 900 / (4 * 450) and 900 / (4 * 250).
        self.assertAlmostEqual(four.efficiency.low, 0.5)
        self.assertAlmostEqual(four.efficiency.high, 0.9)

    def test_weak(self):
        two, eight = self.points("weak", {2: [100, 100, 100], 8: [125, 100, 200]}, lambda ranks: 16 * ranks)
        self.assertEqual(two.efficiency.median, 1.0)
        self.assertAlmostEqual(eight.efficiency.median, 0.8)
        self.assertAlmostEqual(eight.speed_up.median, 6.4)  # of 8 ideal: the base has 2 ranks

    def test_sensitivity_separates_combinations(self):
        for name, step_ms in (("a", 100), ("b", 200)):
            write_run(self.folder, name, 1, step_ms)
        runs = [numbers.read_run(self.folder, name, 10) for name in "ab"]
        points = numbers.make_points(runs, "sensitivity", {"a": {"x.y": "1"}, "b": {"x.y": "2"}})
        self.assertEqual(
            [(p.varied, p.step_ms.median) for p in points], [({"x.y": "1"}, 100), ({"x.y": "2"}, 200)]
        )


if __name__ == "__main__":
    unittest.main()
