# SPDX-License-Identifier: Apache-2.0
"""tools/ddp_top.py: what it draws on screens of several sizes."""

import unittest

from top_support import Top

from run_top import view


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
            "50 %  step 100/200",
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
        self.assertEqual(rows(30)[0], "       10 ##**++--..          ")  # each row twice
        self.assertEqual(rows(15)[:2], ["      9.5 #=.  ", "      1.5 ###+."])  # means of two
        flat = view.curve([(1, 2.0), (2, 2.0)], 12, 2, view.BLOCKS)
        self.assertEqual([line[1][0] for line in flat[:2]], ["  ", "██"])
        self.assertEqual(view.curve([(1, float("nan")), (2, 1.0)], 40, 2, view.BLOCKS), [])

    def test_the_column_of_the_order_is_marked(self):
        self.make_run(owner={})
        state = self.read()
        for column in view.COLUMNS:
            header = "".join(
                text
                for text, _ in view.table(state.ranks, view.Choice(sort=column.key, reverse=True), 200, None)[
                    0
                ]
            )
            self.assertIn(" ^" + column.title, " " + header)

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
            choice.next_sort(80)
            seen.add(choice.sort)
        self.assertIn("step_ms", seen)
        self.assertNotIn("nvlink_mb_per_second", seen)  # a column that 80 columns leave out


if __name__ == "__main__":
    unittest.main()
