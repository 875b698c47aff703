# SPDX-License-Identifier: Apache-2.0
"""Draws a State: lines of (text, style), at most `width` wide. Styles are the keys of screen.STYLES."""

import math
import os
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from scaling.numbers import percent

BLOCKS, ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"  # a cell filled by so many eighths
ORDER_MARKS, ASCII_ORDER_MARKS = "▲▼", "+-"  # of the column by which the ranks ascend, descend
STATUS_STYLES = {
    "running": "good",
    "finished": "good",
    "dead": "bad",
    "quiet": "warning",
    "ended": "warning",
    "unknown": "warning",
}
LABEL = 9  # columns of the curve's axis
MAX_SLOW = 2  # ranks whose cause is shown
INDENT = "    "  # of the rest of a log line
KEYS = "q quit   s sort   r reverse   up/down rank"
UNKNOWN = "-"


@dataclass
class Column:
    """A column of the ranks' table: its title leaves room for the mark of the order. Of columns that do not
    fit, those of the highest `rank` are left out first."""

    key: str
    title: str
    width: int
    rank: int
    text: Callable

    def cell(self, row):
        value = row.get(self.key)
        return (UNKNOWN if value is None else self.text(value)).rjust(self.width)[: self.width]


def plain(digits):
    return lambda value: f"{value:.{digits}f}" if isinstance(value, (int, float)) else str(value)


COLUMNS = [
    Column("rank", "rank", 5, 0, str),
    Column("host", "host", 10, 6, str),
    Column("device", "device", 7, 3, str),
    Column("utilisation_percent", "use %", 6, 1, plain(0)),
    Column("memory_gib", "GiB", 6, 1, plain(2)),
    Column("memory_total_gib", "of GiB", 7, 8, plain(0)),
    Column("temperature_c", "deg C", 6, 2, plain(0)),
    Column("power_w", "W", 5, 2, plain(0)),
    Column("sm_clock_mhz", "SM MHz", 7, 7, plain(0)),
    Column("memory_clock_mhz", "mem MHz", 8, 9, plain(0)),
    Column("pcie_mb_per_second", "PCIe MB/s", 10, 7, plain(0)),
    Column("nvlink_mb_per_second", "NVLink MB/s", 12, 7, plain(0)),
    Column("step_ms", "ms/step", 8, 1, plain(1)),
    Column("busy_ms", "busy ms", 8, 1, plain(1)),
    Column("exposed_comm_ms", "comm ms", 8, 2, plain(2)),
    Column("loader_wait_ms", "load ms", 8, 2, plain(2)),
    Column("rate", "rate/s", 8, 5, plain(1)),
]


HOST_COLUMNS = [
    column
    for column in COLUMNS
    if column.key not in ("host", "step_ms", "busy_ms", "exposed_comm_ms", "loader_wait_ms", "rate")
]


def fitting(columns, width, kept=None):
    """As many columns as fit, in their order; the one with the key `kept` is left out last."""
    columns = list(columns)
    while sum(column.width + 1 for column in columns) - 1 > width and len(columns) > 1:
        columns.remove(max(reversed(columns), key=lambda column: (column.key != kept, column.rank)))
    return columns


@dataclass
class Choice:
    """What the user chose with keys."""

    sort: str = "rank"
    reverse: bool = False
    selected: int | None = None  # a rank

    def sorted(self, ranks):
        known = [rank for rank in ranks if rank.get(self.sort) is not None]
        unknown = [rank for rank in ranks if rank.get(self.sort) is None]
        return sorted(known, key=lambda rank: rank[self.sort], reverse=self.reverse) + unknown

    def next_sort(self, columns, width):
        keys = [column.key for column in fitting(columns, width)]
        self.sort = keys[(keys.index(self.sort) + 1) % len(keys)] if self.sort in keys else keys[0]

    def move(self, ranks, distance):
        order = [rank.get("rank") for rank in self.sorted(ranks)]
        if order:
            place = order.index(self.selected) + distance if self.selected in order else 0
            self.selected = order[min(max(place, 0), len(order) - 1)]


def shown(value, pattern="{}"):
    return UNKNOWN if value is None else pattern.format(value)


def duration(seconds):
    """Half a second is rounded up, as in the log."""
    if seconds is None or not 0 <= seconds < 1e9:
        return UNKNOWN
    days, rest = divmod(math.floor(seconds + 0.5), 86400)
    return (f"{days}d " if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def bar(state, width):
    if not state.max_steps or state.step is None:
        return f"step {shown(state.step)}"
    share = min(1.0, state.step / state.max_steps)
    full = int(share * width)
    head = ">" if full < width else ""
    drawn = "=" * full + head + " " * (width - full - 1)
    return f"[{drawn}] {percent(share)}  step {state.step}/{state.max_steps}"


def place(constants):
    """What runs where: "2 ranks on 1 node, NVIDIA H200, bf16, global batch 64, libddp 0.1.0"."""

    def count(key, word):
        number = constants.get(key)
        return f"{number} {word}{'' if number == '1' else 's'}" if number else ""

    ranks, nodes = count("ranks", "rank"), count("nodes", "node")
    parts = [
        f"{ranks} on {nodes}" if ranks and nodes else ranks or nodes,
        constants.get("gpu_type", ""),
        constants.get("precision", ""),
        f"global batch {constants['global_batch_size']}" if "global_batch_size" in constants else "",
        " ".join(filter(None, (constants.get("program"), constants.get("program_version")))),
        f"libddp {constants['libddp']}" if "libddp" in constants else "",
    ]
    return ", ".join(filter(None, parts))


def own_metrics(custom, width):
    """d_loss 0.1234  g_loss 1.5: in lines of at most `width`."""
    lines = []
    for name, value in custom.items():
        word = (
            f"{name.removesuffix('_per_second')}/s {value:.1f}"
            if name.endswith("_per_second")
            else (f"{name} {value:.4g}")
        )
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += "  " + word
        else:
            lines.append(word)
    return [[(line, "plain")] for line in lines]


def summary(state, width):
    rate = shown(state.rate, "{:.1f}" if (state.rate or 0) < 1000 else "{:.0f}")
    evaluation = "  ".join(
        f"{name.replace('_', ' ')} {percent(value) if name.endswith('accuracy') else f'{value:.4f}'}"
        for name, value in state.evaluation.items()
        if name not in ("step", "epoch")
    )
    at = (
        f"step {state.evaluation['step']:.0f}"
        if "step" in state.evaluation
        else f"the end of epoch {shown(state.evaluation.get('epoch'), '{:.0f}')}"
    )
    lines = [
        [
            (bar(state, max(10, width // 3)), "bold"),
            (f"  epoch {shown(state.epoch, '{:.2f}')}  ETA {duration(state.eta_seconds)}", "plain"),
        ],
        [
            (
                f"loss {shown(state.loss, '{:.4f}')}"
                f"  accuracy {UNKNOWN if state.accuracy is None else percent(state.accuracy)}"
                f"  lr {shown(state.lr, '{:.3g}')}"
                f"  grad norm {shown(state.grad_norm, '{:.3g}')}"
                + ("" if state.mfu is None else f"  MFU {percent(state.mfu)}"),
                "plain",
            )
        ],
        [
            (
                f"{shown(state.step_ms, '{:.1f}')} ms/step  {rate} {state.unit}/s  exposed comm "
                f"{shown(state.exposed_comm_ms, '{:.2f}')} ms"
                f"  loader wait {shown(state.loader_wait_ms, '{:.2f}')} ms",
                "plain",
            )
        ],
        *own_metrics(state.custom, width),
        [(slowest_words(state), "plain")],
    ]
    slow = [slow_words(rank) for rank in state.ranks if rank.get("slow_because")]
    more = [f"and {len(slow) - MAX_SLOW} more ranks"] if len(slow) > MAX_SLOW else []
    for words in slow[:MAX_SLOW] + more:
        lines += [[(part, "warning")] for part in wrapped(words, width)]
    if where := place(state.constants):
        lines += [[(part, "dim")] for part in wrapped(where, width)]
    if evaluation:
        lines.append([(f"at {at}: {evaluation}", "plain")])
    return lines


def slowest_words(state):
    rank = next((rank for rank in state.ranks if rank.get("rank") == state.slowest_rank), None)
    if rank is None:
        return f"slowest rank {UNKNOWN}"
    return (
        f"slowest rank {rank['rank']} ({rank.get('host', UNKNOWN)}): busy {rank['busy_ms']:.1f} of "
        f"{rank['busy_ms'] + rank['exposed_comm_ms']:.1f} ms, "
        f"waits {rank['exposed_comm_ms']:.2f} ms for others"
    )


def slow_words(rank):
    """What rank 0 says of a rank for which the others wait (docs/metrics.md)."""
    since = shown(rank.get("slow_since_step"), "{:.0f}")
    return f"rank {rank['rank']} has been slow since step {since}: {rank['slow_because']}"


def column_means(values, count):
    """`count` numbers from first to last: means of the values in each part, or between two values where
    these are fewer."""
    if len(values) > count:
        edges = [i * len(values) // count for i in range(count + 1)]
        return [sum(values[begin:end]) / (end - begin) for begin, end in zip(edges, edges[1:])]
    result = []
    for i in range(count):
        place = i * (len(values) - 1) / (count - 1)
        left = min(int(place), len(values) - 2)
        result.append(values[left] + (place - left) * (values[left + 1] - values[left]))
    return result


def curve(points, width, height, blocks):
    """The losses as filled columns between their minimum and maximum."""
    points = [(step, loss) for step, loss in points if abs(loss) < float("inf")]
    if len(points) < 2 or width < LABEL + 3 or height < 1:
        return []
    count = width - LABEL - 1
    means = column_means([loss for _, loss in points], count)
    low, high = min(means), max(means)
    levels = [
        round((mean - low) / (high - low) * (8 * height - 1)) + 1 if high > low else 4 * height
        for mean in means
    ]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{high:.4g}" if row == height - 1 else f"{low:.4g}" if row == 0 else ""
        cells = "".join(blocks[min(max(level - 8 * row, 0), 8)] for level in levels)
        lines.append([(label.rjust(LABEL) + " ", "dim"), (cells, "curve")])
    first, last = f"step {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    lines.append([(" " * (LABEL + 1) + first + last.rjust(max(len(last) + 1, count - len(first))), "dim")])
    return lines


def table(ranks, choice, width, slowest, height=None, columns=COLUMNS, marks=ORDER_MARKS):
    """The header and the ranks; with fewer lines than ranks a part that holds the selected one."""
    columns = fitting(columns, width, choice.sort)
    mark = marks[choice.reverse]
    header = " ".join(
        ((mark if column.key == choice.sort else "") + column.title).rjust(column.width) for column in columns
    )
    ranks = choice.sorted(ranks)
    if height is not None and len(ranks) > height - 1:
        room = max(1, height - 2)
        place = next((i for i, rank in enumerate(ranks) if rank.get("rank") == choice.selected), 0)
        begin = min(max(0, place - room // 2), len(ranks) - room)
        note = [[(f"ranks {begin + 1} to {begin + room} of {len(ranks)} in this order", "dim")]]
        ranks = ranks[begin : begin + room]
    else:
        note = []
    lines = [[(header, "header")]]
    for rank in ranks:
        number = rank.get("rank")
        style = "plain"
        if number is not None and number == choice.selected:
            style = "selected"
        elif number is not None and number == slowest:
            style = "warning"
        lines.append([(" ".join(column.cell(rank) for column in columns), style)])
    return lines + note


def details(rank):
    """Two lines on the selected rank: all that narrow screens leave out."""

    def unit(key, word, digits=0):
        return f"{shown(rank.get(key), '{:.' + str(digits) + 'f}')} {word}"

    return [
        [
            (
                f"rank {rank.get('rank')}: {rank.get('host', UNKNOWN)} {rank.get('device', UNKNOWN)} "
                f"{rank.get('gpu_type', '')} "
                f"{rank.get('pci_bus_id', '')}",
                "bold",
            )
        ],
        [
            (
                f"  {unit('memory_gib', 'GiB', 2)} of {unit('memory_total_gib', 'GiB')}, SM "
                f"{unit('sm_clock_mhz', 'MHz')}, "
                f"memory {unit('memory_clock_mhz', 'MHz')}, PCIe {unit('pcie_mb_per_second', 'MB/s')}, "
                f"NVLink {unit('nvlink_mb_per_second', 'MB/s')}",
                "plain",
            )
        ],
    ]


def heading(title, status, style, reason, width):
    clock = time.strftime("%H:%M:%S")
    room = max(0, width - len(status) - len(clock) - 4)
    name = title if len(title) <= room else "..." + title[len(title) - max(0, room - 3) :]
    gap = " " * max(1, width - len(name) - len(status) - len(clock) - 3)
    lines = [[(name, "bold"), ("  " + status.upper(), style), (gap + clock, "dim")]]
    return lines + ([[(reason, style)]] if reason else [])


def selected_details(ranks, choice):
    lines = []
    for rank in ranks:
        if rank.get("rank") == choice.selected:
            lines += details(rank)
    return lines


def draw(state, width, height=None, choice=None, is_ascii=False):
    """A whole screen; with `height` None everything, for --once."""
    choice = choice or Choice()
    blocks = ASCII_BLOCKS if is_ascii else BLOCKS
    marks = ASCII_ORDER_MARKS if is_ascii else ORDER_MARKS
    reason = state.reason or (state.owner or "")
    lines = heading(state.run, state.status, STATUS_STYLES[state.status], "", width)
    lines.append([(reason, STATUS_STYLES[state.status] if state.reason else "dim")])
    lines += summary(state, width)
    selected = selected_details(state.ranks, choice)
    if height is None:
        lines += curve(state.losses, width, 6, blocks)
        lines += table(state.ranks, choice, width, state.slowest_rank, marks=marks)
        return clipped(lines + log_lines(state.log, 10, width), width)
    left = height - len(lines) - len(selected) - 1  # the keys
    wanted = len(state.ranks) + 1 if state.ranks else 0
    log = max(3, left // 5) if state.log else 0
    least = min(wanted, 3)  # lines of the ranks, which go before the curve and the log
    curve_height = min(max(2, (left - log) // 3), 14) if len(state.losses) > 1 and left - least > 2 else 0
    used = curve_height + 1 if curve_height else 0
    ranks = min(wanted, max(least, left - log - used), left - used)
    log = left - used - max(ranks, 0) if state.log else 0  # what the ranks leave
    lines += curve(state.losses, width, curve_height, blocks)
    if ranks > 1:
        lines += table(state.ranks, choice, width, state.slowest_rank, ranks, marks=marks)
    lines += selected + log_lines(state.log, log, width)
    return footed(lines, width, height)


def log_lines(log, count, width):
    """The head and the log's last lines, wrapped, in at most `count` lines. The oldest one is shown whole or
    not at all, unless it is the only one."""
    room, lines = count - 1, []
    if room < 1 or not log:
        return []
    for line in reversed(log[-room:]):
        style = "bad" if "[error]" in line else "warning" if "[warning]" in line else "dim"
        parts = [[(part, style)] for part in wrapped(line, width)]
        if lines and len(parts) + len(lines) > room:
            break
        lines = parts[-room:] + lines
    return [[("log".ljust(width, " "), "header")], *lines]


def wrapped(line, width):
    """Parts of at most `width` cells, cut at spaces if possible; all but the first are indented."""
    parts, indent, text = [], "", visible(line)
    while len(part := beginning(text, width)) < len(text):
        if len(part) <= len(indent):  # not even one character fits
            break
        cut = text.rfind(" ", len(indent) + 1, len(part) + 1)
        cut = cut if cut > 0 else len(part)
        parts.append(text[:cut].rstrip())
        indent = INDENT if width > 2 * len(INDENT) else ""
        text = indent + text[cut:].lstrip()
    return [*parts, part]


def draw_host(records, host, width, height=None, choice=None, is_ascii=False):
    """The GPUs of this host, without a run."""
    choice = choice or Choice()
    rows = [{"rank": index, "host": host, **record} for index, record in enumerate(records)]
    lines = heading(host, f"{len(rows)} GPUs", "good", "", width)
    selected = selected_details(rows, choice)
    left = None if height is None else height - len(lines) - len(selected) - 1
    marks = ASCII_ORDER_MARKS if is_ascii else ORDER_MARKS
    lines += table(rows, choice, width, None, left, HOST_COLUMNS, marks) + selected
    return clipped(lines, width) if height is None else footed(lines, width, height)


def footed(lines, width, height):
    lines = clipped(lines, width)[: height - 1]
    return lines + [[]] * (height - 1 - len(lines)) + [[(KEYS[:width], "dim")]]


def clipped(lines, width):
    """No line is wider, and no text of a run or a log moves the cursor."""
    result = []
    for line in lines:
        parts, room = [], width
        for text, style in line:
            text = beginning(visible(text), room)
            parts.append((text, style))
            room -= cells(text)
        result.append(parts)
    return result


def visible(text):
    return "".join(c if c.isprintable() else " " for c in text)


def cells(text):
    """Cells of the terminal: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def beginning(text, room):
    """As much of a text as fits into so many cells."""
    text = text[: 4 * room]  # combining characters take no room: not without end
    while cells(text) > room:
        text = text[: -max(1, (cells(text) - room) // 2)]
    return text


def text_of(lines):
    plain_lines = ["".join(text for text, _ in line) for line in lines]
    return "".join(line.rstrip() + os.linesep for line in plain_lines)
