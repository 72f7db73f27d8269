"""Plots of a group of rows as lines: latency against size, distributions of single requests, throughput against queue depth. Evict and restore side by side."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.support.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Plot, legend_of_all, logarithmic, panels
from bench.support.row_groups import Group, commonest, least_depth, lines, size_of
from bench.support.rows import Operation, Row
from bench.support.stats import percentile

_COLOURS = {"gds": BLUE, "bounce": ORANGE, "ddr": GREEN, "host": PURPLE, "recompute": BLACK}
_MARKERS = {"gds": "o", "bounce": "s", "ddr": "D", "host": "^", "recompute": "x"}
_OTHER_COLOURS, _OTHER_MARKERS = (VERMILLION, SKY), ("v", "P")
_PANEL_INCHES = 3.3
#: One line of a panel's title, before it would lie on the next panel's.
_TITLE_LETTERS = 58
_CDF_SIZES_MAX = 3
#: A distribution of fewer requests says less than the table's percentiles.
_CDF_SECONDS_MIN = 5
#: Points of one distribution: more can't be seen, and 500 rows are on one page.
_CDF_POINTS_MAX = 101


def line_plots(group: Group) -> Iterator[Plot]:
    """Those that have at least one line to draw."""
    yield from _latency_plot(group)
    yield from _distribution_plot(group)
    yield from _depth_plot(group)


def colour(label: str) -> str:
    """Of a line, by its path: the same in every plot of a page."""
    path = label.partition(",")[0]
    return _COLOURS.get(path) or _OTHER_COLOURS[sum(path.encode()) % len(_OTHER_COLOURS)]


def marker(label: str) -> str:
    """Of a line, by its path."""
    path = label.partition(",")[0]
    return _MARKERS.get(path) or _OTHER_MARKERS[sum(path.encode()) % len(_OTHER_MARKERS)]


@dataclass(frozen=True, slots=True)
class _Series:
    """A line of one panel; in another panel of the same plot the same label looks the same."""

    label: str
    rows: list[Row]
    look: dict[str, Any]


#: Of the lines of one path, whose colour and marker are the path's: dashes, and whether markers are filled.
_VARIANTS: tuple[tuple[Any, bool], ...] = (("-", True), ((0, (6, 1.5)), False), ((0, (1.5, 1.2)), True), ((0, (6, 1.5, 1, 1.5)), False))


def _series(chosen: dict[Operation, list[Row]]) -> dict[Operation, list[_Series]]:
    """Lines of each operation's rows. Estimates are dashed."""
    found = {operation: lines(rows) for operation, rows in chosen.items()}
    variants: dict[str, list[str]] = {}
    for label in dict.fromkeys(label for labelled in found.values() for label in labelled):
        variants.setdefault(label.partition(",")[0], []).append(label)
    return {
        operation: [_Series(label, rows, _look(label, variants[label.partition(",")[0]].index(label), rows[0].estimated)) for label, rows in labelled.items()]
        for operation, labelled in found.items()
    }


def _look(label: str, variant: int, is_estimated: bool) -> dict[str, Any]:
    dashes, is_filled = _VARIANTS[variant % len(_VARIANTS)]
    return {
        "color": colour(label),
        "marker": marker(label),
        "markersize": 5,
        "markerfacecolor": colour(label) if is_filled else "white",
        "linestyle": "--" if is_estimated else dashes,
        "linewidth": 1.6,
    }


def panel_title(operation: Operation, rows: Sequence[Row], before: str = "") -> str:
    """What stands before, the operation, and which paths acknowledge what: COPIED and DURABLE are answered at different moments."""
    acks: dict[str, list[str]] = {}
    for row in rows:
        if row.case.ack:
            acks.setdefault(row.case.ack, []).append(row.case.path)
    told = "; ".join(f"{ack}: {', '.join(dict.fromkeys(paths))}" for ack, paths in acks.items())
    return textwrap.fill(f"{before}{operation} ({told})" if told else f"{before}{operation}", _TITLE_LETTERS)


def _latency_plot(group: Group) -> Iterator[Plot]:
    chosen = {operation: least_depth(group.of(operation)) for operation in group.operations}
    chosen = {operation: rows for operation, rows in chosen.items() if len({row.case.tokens for row in rows}) > 1}
    if not chosen:
        return
    sizes = {row.case.tokens: row.case.payload_bytes for rows in chosen.values() for row in rows}
    with panels(1, len(chosen), height_inches=_PANEL_INCHES + 0.6) as (canvas, every, out):
        series = _series(chosen)
        for axes, (operation, rows) in zip(every, chosen.items(), strict=True):
            for one in series[operation]:
                tokens, middle = [row.case.tokens for row in one.rows], [row.figure.value for row in one.rows]
                if not one.rows[0].estimated:
                    late = [percentile(row.seconds, 99) * 1e3 for row in one.rows]
                    axes.fill_between(tokens, middle, late, color=one.look["color"], alpha=0.16, linewidth=0)
                axes.plot(tokens, middle, **one.look)
            logarithmic(axes, axes.yaxis)
            _sizes_axis(axes, sizes)
            _finish(axes, operation, rows)
        _same_scale(every)
        every[0].set_ylabel("latency, ms, logarithmic")
        _legend(canvas, series, [Patch(facecolor=GREY, alpha=0.35, label="p50 (line) to p99 (edge of the band)")])
    depths = sorted({row.case.queue_depth for rows in chosen.values() for row in rows})
    yield Plot(f"Latency against size, {_depths(depths)}", out[0], [])


def _depths(depths: Sequence[int]) -> str:
    return f"queue depth {depths[0]}" if len(depths) == 1 else f"least queue depth of each ({depths[0]} to {depths[-1]})"


def _sizes_axis(axes: Axes, sizes: dict[int, int]) -> None:
    """Ticks at sizes that were measured, as tokens and as bytes; those too near to the one before are not labelled."""
    axes.set_xscale("log")
    low, high = min(sizes), max(sizes)
    axes.set_xlim(low / 1.25, high * 1.25)
    apart = math.log(high / low) / 6
    ticks: list[int] = []
    for tokens in sorted(sizes, reverse=True):
        if not ticks or math.log(ticks[-1] / tokens) >= apart:
            ticks.append(tokens)
    axes.set_xticks(ticks, [f"{tokens:,}\n{size_of(sizes[tokens])}" for tokens in ticks], fontsize=8)
    axes.set_xticks([tokens for tokens in sizes if tokens not in ticks], minor=True)
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="x", which="both", color="#e2e2e2", linewidth=0.6)
    axes.set_xlabel("tokens, and bytes of one rank")


def _distribution_plot(group: Group) -> Iterator[Plot]:
    """At the smallest, the middle and the greatest size that most lines have, at the least depth."""
    rows = [row for row in least_depth(group.rows) if not row.estimated and len(row.seconds) >= _CDF_SECONDS_MIN]
    if not rows:
        return
    sizes = sorted({row.case.tokens for row in rows})
    sizes = sizes if len(sizes) <= _CDF_SIZES_MAX else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    operations = [operation for operation in group.operations if any(row.case.operation is operation for row in rows)]
    series = _series({operation: [row for row in rows if row.case.operation is operation and row.case.tokens in sizes] for operation in operations})
    with panels(len(sizes), len(operations), height_inches=(_PANEL_INCHES - 0.7) * len(sizes) + 0.7) as (canvas, every, out):
        for place, axes in enumerate(every):
            tokens, operation = sizes[place // len(operations)], operations[place % len(operations)]
            here = []
            for one in series[operation]:
                for row in (row for row in one.rows if row.case.tokens == tokens):
                    here.append(row)
                    seconds = _thinned(row.seconds)
                    shares = [number / (len(seconds) - 1) for number in range(len(seconds))]
                    axes.plot([value * 1e3 for value in seconds], shares, **one.look | {"marker": ""})
                    # The median carries the marker, or in grey print the lines could not be told from each other.
                    axes.plot(row.figure.value, 0.5, **one.look | {"markersize": 6})
            if here:
                logarithmic(axes, axes.xaxis)
                size = f"{tokens:,} tokens, {size_of(here[0].case.payload_bytes)}"
                _finish(axes, operation, here, f"{size}: ")
            else:
                axes.set_axis_off()
            axes.set_ylim(-0.02, 1.02)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "¼", "p50", "¾", "p95"])
            axes.grid(axis="y", color="#e2e2e2", linewidth=0.6)
            if place % len(operations) == 0:
                axes.set_ylabel("share of requests")
            if place >= len(every) - len(operations):
                axes.set_xlabel("latency of one request, ms, logarithmic")
        for first in range(0, len(every), len(operations)):
            _same_scale([axes for axes in every[first : first + len(operations)] if axes.axison], along_x=True)
        _legend(canvas, series, [])
    yield Plot("Distribution of single requests", out[0], [])


def _thinned(seconds: Sequence[float]) -> list[float]:
    count = min(len(seconds), _CDF_POINTS_MAX)
    return [seconds[round(number * (len(seconds) - 1) / (count - 1))] for number in range(count)]


def _depth_plot(group: Group) -> Iterator[Plot]:
    """At the size that was run at most depths; thin dotted lines are ceilings."""
    chosen: dict[Operation, list[Row]] = {}
    for operation in group.operations:
        rows = [row for row in group.of(operation) if not row.estimated]
        depths_of = {tokens: {row.case.queue_depth for row in rows if row.case.tokens == tokens} for tokens in group.tokens}
        tokens = commonest(tokens for tokens, depths in depths_of.items() for _ in depths)
        if tokens is not None and len(depths_of[tokens]) > 1:
            chosen[operation] = [row for row in rows if row.case.tokens == tokens]
    if not chosen:
        return
    with panels(1, len(chosen), height_inches=_PANEL_INCHES + 0.6) as (canvas, every, out):
        series = _series(chosen)
        for axes, (operation, rows) in zip(every, chosen.items(), strict=True):
            for one in series[operation]:
                axes.plot([row.case.queue_depth for row in one.rows], [row.gb_per_s for row in one.rows], **one.look)
                bounded = [(row.case.queue_depth, row.ceiling_gb_per_s) for row in one.rows if row.ceiling_gb_per_s is not None]
                if bounded:
                    axes.plot(*zip(*bounded, strict=True), color=one.look["color"], linewidth=1.1, linestyle=":")
            axes.set_xscale("log", base=2)
            every_depth = sorted({row.case.queue_depth for row in rows})
            axes.set_xticks(every_depth, [str(depth) for depth in every_depth])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("requests in flight")
            axes.grid(color="#e2e2e2", linewidth=0.6)
            axes.set_ylim(bottom=0)
            _finish(axes, operation, rows, f"{rows[0].case.tokens:,} tokens, {size_of(rows[0].case.payload_bytes)}: ")
        _same_scale(every)
        every[0].set_ylabel("GB/s of all requests together")
        _legend(canvas, series, [Line2D([], [], color=GREY, linewidth=1.1, linestyle=":", label="the ceiling of that colour's path")])
    yield Plot("Throughput against queue depth", out[0], [])


def _finish(axes: Axes, operation: Operation, rows: Sequence[Row], before: str = "") -> None:
    axes.set_title(panel_title(operation, rows, before), fontsize=9, loc="left")


def _same_scale(every: Sequence[Axes], *, along_x: bool = False) -> None:
    """Evict and restore are compared by eye, so they have one scale."""
    limits = [axes.get_xlim() if along_x else axes.get_ylim() for axes in every]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    for axes in every:
        (axes.set_xlim if along_x else axes.set_ylim)(low, high)


def _legend(canvas: Canvas, series: dict[Operation, list[_Series]], more: Sequence[Line2D | Patch]) -> None:
    """Every line of all panels once, above them."""
    handles: dict[str, Line2D] = {}
    for one in (one for found in series.values() for one in found):
        told = f"{one.label}, estimated" if one.rows[0].estimated else one.label
        handles.setdefault(told, Line2D([], [], label=told, **one.look))
    legend_of_all(canvas, [*handles.values(), *more])
