# SPDX-License-Identifier: Apache-2.0
"""The charts of run pages: axes, ticks, and which points are drawn."""

import math
import unittest

import study_support  # noqa: F401 (finds the tools)

from run_page import chart
from run_page.panels import Panel


class Charts(unittest.TestCase):
    def ticks(self, low, high, count=7):
        axis = chart.Axis(low, high, 0, 100, count)
        return axis.labels()

    def test_ticks(self):
        self.assertEqual(
            self.ticks(0, 186, 10), ["0", "20", "40", "60", "80", "100", "120", "140", "160", "180"]
        )
        self.assertEqual(self.ticks(1.93, 2.31), ["2.0", "2.1", "2.2", "2.3"])
        self.assertEqual(self.ticks(-3e-6, 5.2e-5), ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"])
        self.assertEqual(self.ticks(0, 412345), ["0", "100k", "200k", "300k", "400k"])
        self.assertEqual(self.ticks(0, 1.8e6), ["0.0", "0.5M", "1.0M", "1.5M"])
        self.assertEqual(self.ticks(0, 3, 3), ["0", "1", "2", "3"])

    def test_the_value_axis(self):
        def axis(unit, values):
            return chart.value_axis(Panel("Curves", "t", unit), [values])

        self.assertEqual(axis("ms", [90, 100]).low, 0)
        self.assertGreater(axis("", [90, 100]).low, 89)
        for values in ([0, 0], [5, 5], [-2], [2.5, 2.5 + 1e-12]):
            self.assertEqual(len(set(axis("", values).labels())), len(axis("", values).ticks), values)
            self.assertGreater(len(axis("", values).ticks), 1)
        spike = axis("", [1, 1, 2, 900])
        self.assertTrue(spike.log)
        self.assertEqual(spike.labels(), ["1", "10", "100", "1000"][: len(spike.ticks)])
        self.assertAlmostEqual(spike.at(10) - spike.at(1), spike.at(100) - spike.at(10))
        self.assertFalse(axis("", [-1, 1, 2, 900]).log)

    def range_of(self, *series, unit=""):
        axis = chart.value_axis(Panel("Curves", "t", unit), series)
        return axis.log, *((10**axis.low, 10**axis.high) if axis.log else (axis.low, axis.high))

    def test_an_axis_shows_the_usual_values(self):
        curve = [0.1 + 0.001 * i for i in range(100)]
        # One far value is left out, on either side; a whole series and the first steps are not.
        is_log, low, high = self.range_of([*curve, 14])
        self.assertEqual((is_log, 0 < low < 0.1, 0.19 < high < 0.25), (False, True, True))
        is_log, low, high = self.range_of([*curve, -14])
        self.assertEqual((is_log, 0 < low < 0.12, 0.19 < high < 0.25), (False, True, True))
        self.assertGreater(self.range_of(curve, [14] * 3)[2], 14)
        self.assertEqual(self.range_of([*range(10)])[0], False)
        # A far value above a curve that falls by much: logarithmic.
        falling = [2.4 - 0.012 * i for i in range(100)]
        for series in ([[*falling, 14]], [falling, [3.4, 10, 4.4, 1.8, 2, 1.6, 1.6, 1.4]]):
            is_log, low, high = self.range_of(*series)
            self.assertEqual((is_log, low <= 1.21, high >= 10), (True, True, True), series)
        # Two series of other sizes.
        self.assertTrue(self.range_of([0.01, 0.02], [100, 90])[0])
        # A schedule that ends near 0 keeps its shape, also beside one that is ten times as high.
        schedule = [0.5 - 0.5 * math.cos(math.pi * i / 100) + 1e-7 for i in range(101)]
        self.assertFalse(self.range_of(schedule, [0.08 * lr for lr in schedule])[0])
        # Logarithms do not help where the far values are low: accuracy.
        rising = [0.12, 0.2, 0.3, 0.4, 0.5, *(0.53 + 0.0044 * i for i in range(96))]
        self.assertFalse(self.range_of(rising)[0])
        # A value with a unit: from 0, never logarithmic.
        is_log, low, high = self.range_of([100 + i % 3 for i in range(50)] + [900], unit="ms")
        self.assertEqual((is_log, low, 102 < high < 110), (False, 0, True))
        self.assertGreater(self.range_of([5, 900], unit="ms")[2], 900)  # two values have no usual one

    def test_long_series_keep_their_extremes(self):
        points = [(x, math.sin(x)) for x in range(100000)]
        points[777], points[5555] = (777, 50), (5555, -50)
        kept = chart.thinned(points)
        self.assertLessEqual(len(kept), chart.DRAWN)
        self.assertEqual((max(y for _, y in kept), min(y for _, y in kept)), (50, -50))
        self.assertEqual(kept, sorted(kept))


if __name__ == "__main__":
    unittest.main()
