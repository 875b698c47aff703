# SPDX-License-Identifier: Apache-2.0
"""A chart as SVG text."""

import math
import statistics

from scaling.report import text

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 58, WIDTH - 14, 10, HEIGHT - 40  # of the axes
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#111111")  # Okabe and Ito's
DASHES = ("none", "7 4", "2 3", "10 3 2 3")
MARKED = 40  # a series of at most so many points shows each, with its value
DRAWN = 800  # of a longer series so many are drawn
LOG_RATIO = 10  # largest value to median, from which on the axis is logarithmic
FEW = 20  # an axis may leave out one of so many values of a series
LEAST_POINTS = 5  # of a series that may lose a value
GOOD_SHARE, LEAST_SHARE = 0.5, 0.25  # of an axis that the other values span


def pen(index, number=0):
    """(colour, dashes) of a run and of its series of this number."""
    return PALETTE[index % len(PALETTE)], DASHES[(number + index // len(PALETTE)) % len(DASHES)]


def shown(value):
    """A number with four digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def thinned(points):
    """At most DRAWN points; of each stretch the lowest and the highest."""
    if len(points) <= DRAWN:
        return points
    length = math.ceil(2 * len(points) / DRAWN)
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    result = []
    for part in stretches:
        result += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return result


def smoothed(points, count):
    """Means of the last `count` points."""
    values = [y for _, y in points]
    return [(x, statistics.fmean(values[max(0, end - count) : end])) for end, (x, _) in enumerate(points, 1)]


class Axis:
    """Maps values between `low` and `high` to pixels between `start` and `end`."""

    def __init__(self, low, high, start, end, num_ticks, log=False):
        self.start, self.end, self.log = start, end, log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        if log:
            factors = (1, 2, 5) if high < 200 * low else (1,)
            ticks = []
            for power in range(math.floor(self.low), math.ceil(self.high)):
                ticks += [factor * 10.0**power for factor in factors]
            ticks = [tick for tick in ticks if low <= tick <= high]
            self.ticks = ticks[:: max(1, math.ceil(len(ticks) / num_ticks))]
        else:
            rough = (high - low) / num_ticks
            power = 10 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
            self.ticks = [
                step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
            ]

    def at(self, value):
        return self.start + (self.end - self.start) * (
            (math.log10(value) if self.log else value) - self.low
        ) / (self.high - self.low)

    def is_above(self, value):
        return not self.log and value > self.high

    def is_below(self, value):
        return not self.log and value < self.low

    def inside(self, value):
        """at(), and an end of the axis for a value that it does not reach."""
        return self.start if self.is_below(value) else self.end if self.is_above(value) else self.at(value)

    def labels(self):
        """Shortest texts that tell the ticks apart."""
        top = max(map(abs, self.ticks), default=0)
        if self.log or 0 < top < 1e-3:
            return [f"{tick:g}".replace("e-0", "e-").replace("e+0", "e") for tick in self.ticks]
        factor, letter = 1, ""
        for known_factor, known_letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
            if top >= least:
                factor, letter = known_factor, known_letter
                break
        shown_ticks = [tick / factor for tick in self.ticks]
        digits = 0
        while digits < 8 and any(abs(round(tick, digits) - tick) >= 1e-9 for tick in shown_ticks):
            digits += 1
        return [f"{tick / factor:.{digits}f}{letter if tick else ''}" for tick in self.ticks]


def usual(values):
    """(lowest, highest) of a series without its few extremes on either side."""
    values = sorted(values)
    few = max(1, len(values) // FEW) if len(values) >= LEAST_POINTS else 0
    kept = values[few : len(values) - few]
    return kept[0], kept[-1]


def value_axis(panel, series):
    """The axis for series of values, from 0 where they have a unit. It is linear if the usual values span
    enough of it. Else it is logarithmic, without a unit, if the far values lie above and the usual ones then
    span enough. Else, if they span little, it leaves out the far values."""
    values = [value for part in series for value in part]
    low, high = min(values), max(values)
    ranges = [usual(part) for part in series]
    usual_low, usual_high = min(start for start, _ in ranges), max(end for _, end in ranges)
    if panel.unit:
        low, usual_low = min(low, 0), min(usual_low, 0)
    span = usual_high - usual_low
    if 0 < low < high and high - usual_high >= usual_low - low:
        is_wide = high > LOG_RATIO * min(statistics.median(part) for part in series)
        share = math.log(usual_high / usual_low) / math.log(high / low)
        is_crowded = span < GOOD_SHARE * (high - low)
        if (is_wide and share >= GOOD_SHARE) or (is_crowded and share >= LEAST_SHARE):
            return Axis(low / 1.2, high * 1.2, BOTTOM, TOP, 7, log=True)
    if span < LEAST_SHARE * (high - low):
        low = usual_low if usual_low - low > span else low
        high = usual_high if high - usual_high > span else high
    # Keeps lines away from the frame.
    room = 0.04 * (high - low) if high - low > 1e-6 * abs(high) else abs(high) / 10 or 1
    return Axis(low if low == 0 else low - room, high + room, BOTTOM, TOP, 7)


def frame(title, x, y, x_labels, x_title):
    """The open <svg> with its axes."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">']
    parts += [
        f'<path class="grid" d="M{LEFT} {y.at(tick):.1f}H{RIGHT}"/><text x="{LEFT - 6}" '
        f'y="{y.at(tick) + 4:.1f}" '
        f'text-anchor="end">{label}</text>'
        for tick, label in zip(y.ticks, y.labels())
    ]
    parts += [
        f'<path class="axis" d="M{x.at(tick):.1f} {BOTTOM}v4"/><text x="{x.at(tick):.1f}" y="{BOTTOM + 17}" '
        f'text-anchor="middle">{label}</text>'
        for tick, label in zip(x.ticks, x_labels)
    ]
    parts.append(
        f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>'
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{text(x_title)}</text>'
    )
    return parts


def draw(panel, runs, smooth):
    """A figure. All figures of a page have the same steps."""
    last = max(run.last for run in runs) or 1
    x = Axis(0, last, LEFT, RIGHT, min(10, last))  # ticks at whole steps
    series = [[value for _, value in points] for *_, points in panel.series]
    y = value_axis(panel, series)
    parts = frame(panel.title, x, y, x.labels(), runs[0].x)
    for run, label, table, points in panel.series:
        stroke, dash = style(panel, run, label, runs)
        name = f"{runs[run].label}, {label}"
        parts += lines(points, stroke, dash, x, y, smooth if table == "steps" else 1)
        parts += marks(points, stroke, x, y, name)
    title = panel.title + (f" [{panel.unit}]" if panel.unit else "") + (", logarithmic" if y.log else "")
    caption = f"<b>{text(title)}</b> {legend(panel, runs)}{left_out(y, series)}"
    return f"<figure><figcaption>{caption}</figcaption>{''.join(parts)}</svg></figure>"


def left_out(y, series):
    """How many values the axis does not reach, and how far they go."""
    values = [value for part in series for value in part]
    above, below = list(filter(y.is_above, values)), list(filter(y.is_below, values))
    notes = [f"\u25b2 {len(above)} above, up to {shown(max(above))}"] if above else []
    notes += [f"\u25bc {len(below)} below, down to {shown(min(below))}"] if below else []
    return "".join(f"<small>{note}</small> " for note in notes)


def style(panel, run, label, runs):
    """(colour, dashes): colours tell several runs apart, and dashes their series; colours the series of a
    single run."""
    number = panel.labels().index(label)
    return pen(run, number) if len(runs) > 1 else pen(number)


def line(places, stroke, dash, opacity=1):
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="line" stroke="{stroke}" stroke-dasharray="{dash}" opacity="{opacity}" d="M{way}"/>'


def lines(points, stroke, dash, x, y, smooth):
    """A series; with `smooth` rows a mean, the series itself is faint."""
    raw = [(x.at(a), y.inside(b)) for a, b in thinned(points)]
    mean = [(x.at(a), y.inside(b)) for a, b in thinned(smoothed(points, smooth))]
    return [*([line(raw, stroke, "none", 0.25)] if smooth > 1 else []), line(mean, stroke, dash)]


def marks(points, stroke, x, y, name):
    """Each point of a short series, and an arrow in place of each value that the axis does not reach."""
    result = []
    for a, b in points if len(points) <= MARKED else thinned(points):
        title = f"<title>{text(name)}, {a:g}: {shown(b)}</title>"
        if y.is_above(b) or y.is_below(b):
            tip, base = (TOP, 8) if y.is_above(b) else (BOTTOM, -8)
            result.append(f'<path fill="{stroke}" d="M{x.at(a):.1f} {tip}l-4.5 {base}h9z">{title}</path>')
        elif len(points) <= MARKED:
            result.append(
                f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.4" fill="{stroke}">{title}</circle>'
            )
    return result


def key(name, stroke, dash):
    """A name behind its line."""
    sample = line([(1, 5), (25, 5)], stroke, dash)
    return f'<span class="key"><svg width="26" height="10">{sample}</svg> {text(name)}</span>'


def run_keys(runs):
    """The runs' names; behind their lines where there are several."""
    return (
        [key(run.label, *pen(index)) for index, run in enumerate(runs)]
        if len(runs) > 1
        else [text(runs[0].label)]
    )


def legend(panel, runs):
    """What each line is; nothing for a single line."""
    several = len(runs) > 1
    drawn_runs = sorted({run for run, *_ in panel.series})
    keys = [run_keys(runs)[run] for run in drawn_runs] if several else []
    for label in panel.labels() if len(panel.labels()) > 1 else []:
        stroke, dash = style(panel, 0, label, runs)
        keys.append(key(label, "#555" if several else stroke, dash))
    return "".join(keys)
