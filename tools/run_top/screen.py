# SPDX-License-Identifier: Apache-2.0
"""The terminal, by curses: draws what view returns and hands keys to the choice."""

import contextlib
import curses
import time

from .view import cells

SELECTED, PLAIN = "selected", "plain"
STYLES = {
    "bold": (None, curses.A_BOLD),
    "dim": (None, curses.A_DIM),
    "header": (None, curses.A_REVERSE),
    SELECTED: (curses.COLOR_CYAN, curses.A_REVERSE),
    "curve": (curses.COLOR_CYAN, 0),
    "good": (curses.COLOR_GREEN, curses.A_BOLD),
    "warning": (curses.COLOR_YELLOW, 0),
    "bad": (curses.COLOR_RED, curses.A_BOLD),
    PLAIN: (None, 0),
}


def attributes():
    has_colors = curses.has_colors()
    if has_colors:
        curses.use_default_colors()
    result = {}
    for number, (name, (color, attribute)) in enumerate(STYLES.items(), 1):
        if has_colors and color is not None:
            curses.init_pair(number, color, -1)
            attribute |= curses.color_pair(number)
        result[name] = attribute
    return result


def paint(window, lines, styles):
    window.erase()
    height, width = window.getmaxyx()
    for row, line in enumerate(lines[:height]):
        column = 0
        for text, style in line:
            with contextlib.suppress(curses.error):  # the cursor cannot stand behind the last cell
                window.addnstr(row, column, text, width - column, styles[style])
            column += cells(text)
    window.refresh()


def show(source, choice, seconds, is_ascii):
    """Until q: reads the source every `seconds`, draws after each reading and key. False for a terminal that
    curses does not know."""

    def loop(window):
        with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor
            curses.curs_set(0)
        styles = attributes()
        state, next_time = None, 0.0
        while True:
            if time.monotonic() >= next_time:
                state, next_time = source.read(), time.monotonic() + seconds
            height, width = window.getmaxyx()
            paint(window, source.draw(state, width, height, choice, is_ascii), styles)
            window.timeout(max(0, int(1000 * (next_time - time.monotonic()))))
            key = window.getch()
            if key in (ord("q"), 27):
                return
            if key == ord("s"):
                choice.next_sort(source.columns, width)
            elif key == ord("r"):
                choice.reverse = not choice.reverse
            elif key in (curses.KEY_DOWN, ord("j")):
                choice.move(source.ranks_of(state), 1)
            elif key in (curses.KEY_UP, ord("k")):
                choice.move(source.ranks_of(state), -1)

    try:
        curses.setupterm()
    except curses.error:
        return False
    curses.wrapper(loop)
    return True
