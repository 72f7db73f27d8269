"""Plots of a result, as SVG for a page that fetches nothing. Needs matplotlib, the `bench` extra.

Colours are of Okabe and Ito's palette, which colour-blind readers tell apart; markers and hatches say the same in grey print.
"""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.support.report import Figure
from bench.support.result import Result, Spread, shown, spreads, stable_name

BLUE, VERMILLION, GREY, ORANGE, BLACK = "#0072B2", "#D55E00", "#999999", "#E69F00", "#222222"
#: Text stays text (searchable, and small); names with a dollar sign are no formulas; ids come from the content alone, so that a page can be made again.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "offloadd",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_WIDTH_INCHES = 9.5
#: A page ten screens tall is no overview: longer plots go on in a next one.
_ROWS_MAX = 24
#: Milliseconds of one unit of time.
_MS = {"ns": 1e-6, "µs": 1e-3, "us": 1e-3, "ms": 1.0, "s": 1e3}
_MARKERS = {0.0: "|", 50.0: "o", 95.0: "s", 99.0: "D", 100.0: "|"}
_COLOURS = {0.0: BLACK, 50.0: BLUE, 95.0: ORANGE, 99.0: VERMILLION, 100.0: BLACK}
_LABELS = {0.0: "least", 50.0: "median", 95.0: "p95", 99.0: "p99", 100.0: "greatest"}


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing. `key` explains the numbers in it, in order."""

    title: str
    svg: str
    key: list[str]


def plots(result: Result) -> list[Plot]:
    """Every plot that the figures allow; none for figures that have nothing to draw."""
    with matplotlib.rc_context(_STYLE):
        return [*_ratio_plots(result), *_latency_plots(result), *_cpu_plots(result)]


def _ratio_plots(result: Result) -> Iterator[Plot]:
    bars = [(figure, figure.ratio) for figure in result.figures if figure.ratio is not None]
    for part, rows in _parts(bars):
        with _canvas(len(rows)) as (axes, out):
            # All parts of one plot on one scale, or bars of equal length would differ.
            axes.set_xlim(0, 1.04 * max(1.0, *(ratio for _, ratio in bars)))
            for row, (figure, ratio) in enumerate(rows):
                missed = figure.met is False
                colour = GREY if figure.met is None else VERMILLION if missed else BLUE
                axes.barh(row, ratio, 0.62, color=colour, hatch="////" if missed else None, edgecolor="white" if missed else colour)
                # Beside the axes: at the end of its bar a number would lie under the target's mark.
                axes.text(1.01, row, f"{ratio:.2f}", transform=axes.get_yaxis_transform(), va="center")
                if figure.target is not None and figure.target.on_ratio:
                    axes.plot([figure.target.limit] * 2, [row - 0.42, row + 0.42], color=BLACK, linewidth=2.2)
            axes.axvline(1.0, color=BLACK, linewidth=0.8, linestyle="--")
            _name_rows(axes, [stable_name(figure) for figure, _ in rows])
            axes.set_xlabel("ratio to the ceiling of the same run (dashed: as good as the ceiling)")
            _legend(
                axes,
                [
                    Patch(facecolor=BLUE, label="target met"),
                    Patch(facecolor=VERMILLION, hatch="////", edgecolor="white", label="target missed"),
                    Patch(facecolor=GREY, label="no target"),
                    Line2D([], [], color=BLACK, linewidth=0, marker="|", markersize=11, markeredgewidth=2.2, label="target on the ratio"),
                ],
            )
        yield Plot(f"Ratio to ceiling{part}", out[0], [])


def _latency_plots(result: Result) -> Iterator[Plot]:
    series = [found for figure in result.figures for found in _times_ms(figure)]
    if not series:
        return
    every = [value for _, quantiles in series for value in quantiles.values()]
    for part, rows in _parts(series):
        with _canvas(len(rows)) as (axes, out):
            drawn = set()
            for row, (_, quantiles) in enumerate(rows):
                axes.plot([min(quantiles.values()), max(quantiles.values())], [row, row], color=GREY, linewidth=1.4, zorder=1)
                if 25.0 in quantiles and 75.0 in quantiles:
                    axes.plot([quantiles[25.0], quantiles[75.0]], [row, row], color=GREY, linewidth=7, solid_capstyle="butt", zorder=1)
                for percent, value in quantiles.items():
                    if percent in _MARKERS:
                        drawn.add(percent)
                        axes.scatter(value, row, s=34, color=_COLOURS[percent], marker=_MARKERS[percent], zorder=3)
            _logarithmic(axes, axes.xaxis)
            # All parts of a plot have one scale, to be compared.
            axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
            _name_rows(axes, [name for name, _ in rows])
            axes.set_xlabel("ms, logarithmic (bar: p25 to p75, where recorded)")
            _legend(
                axes,
                [
                    Line2D([], [], linewidth=0, marker=_MARKERS[percent], color=_COLOURS[percent], markersize=6, label=_LABELS[percent])
                    for percent in sorted(drawn)
                ],
            )
        yield Plot(f"Latencies{part}", out[0], [])


def _times_ms(figure: Figure) -> Iterator[tuple[str, dict[float, float]]]:
    """Series of times, each with a name; one without prefix is in the figure's unit. A logarithm takes no zero."""
    found = spreads(figure)
    for one in found:
        scale = _MS.get(_unit_of(one, figure))
        if scale is not None and min(one.quantiles.values()) > 0:
            kind = one.prefix.removesuffix("_").rpartition("_")[0]
            name = stable_name(figure) + (f" ({kind})" if kind and len(found) > 1 else "")
            yield name, {percent: value * scale for percent, value in one.quantiles.items()}


def _unit_of(spread: Spread, figure: Figure) -> str:
    return spread.prefix.removesuffix("_").rpartition("_")[2] if spread.prefix else figure.unit


def _cpu_plots(result: Result) -> Iterator[Plot]:
    points = []
    for figure in result.figures:
        cpu = figure.detail.get("cpu_s_per_gb")
        if figure.unit == "GB/s" and isinstance(cpu, int | float) and not isinstance(cpu, bool) and cpu > 0 and figure.value > 0:
            points.append((figure, float(cpu)))
    if not points:
        return
    with _canvas(16) as (axes, out):
        places = [(cpu, figure.value) for figure, cpu in points]
        axes.scatter([cpu for cpu, _ in places], [rate for _, rate in places], s=26, color=BLUE, zorder=3)
        for place, numbers in _labels(places):
            axes.annotate(numbers, place, (5, 4), textcoords="offset points", zorder=4)
        _logarithmic(axes, axes.xaxis)
        _logarithmic(axes, axes.yaxis)
        axes.set_xlabel("CPU seconds per GB, logarithmic (left is better)")
        axes.set_ylabel("GB/s, logarithmic (up is better)")
    yield Plot("Throughput against CPU", out[0], [f"{stable_name(figure)}: {shown(figure.value)} GB/s, {shown(cpu)} s/GB" for figure, cpu in points])


def _labels(places: Sequence[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], str]]:
    """Numbers from 1 on; points within 5 % of each other share one label, which would be illegible in layers."""
    left = dict(enumerate(places, start=1))
    while left:
        first = next(iter(left.values()))
        near = [number for number, place in left.items() if all(abs(math.log(one / other)) < 0.05 for one, other in zip(place, first, strict=True))]
        yield max(left[number] for number in near), ", ".join(map(str, near))
        for number in near:
            del left[number]


def _logarithmic(axes: Axes, axis: Axis) -> None:
    """With labels at 1, 2 and 5: a scale within one decade would have one label or none."""
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    axis.set_major_formatter(lambda value, _: shown(value))
    axis.set_minor_formatter(lambda value, _: shown(value) if f"{value:.0e}"[0] in "25" else "")
    axis.set_tick_params(which="minor", labelsize=7.5)
    axis.grid(which="both", color="#e2e2e2", linewidth=0.6)


def _parts(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Rows in parts of even length, none longer than the limit, and what to add to the title."""
    count = -(-len(rows) // _ROWS_MAX)
    for part in range(count):
        title = "" if count == 1 else f" ({part + 1} of {count})"
        yield title, rows[len(rows) * part // count : len(rows) * (part + 1) // count]


@contextmanager
def _canvas(row_count: int) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; afterwards the list holds the SVG element."""
    canvas = Canvas(figsize=(_WIDTH_INCHES, 1.1 + 0.34 * row_count))
    out: list[str] = []
    yield canvas.add_subplot(), out
    text = StringIO()
    canvas.savefig(text, format="svg", bbox_inches="tight", metadata=_METADATA)
    out.append(_inline(text.getvalue()))


def _inline(document: str) -> str:
    """The SVG element as HTML wants it: without prolog and namespaces, which would be the page's only addresses."""
    element = document[document.index("<svg") :]
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """The first row on top."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 52) for name in names], fontsize=7.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(handles), frameon=False, borderaxespad=0.2)
