"""Plots of a result, as SVG for a page that fetches nothing: of its figures here, of its rows in modules of their own."""

import math
from collections.abc import Iterator, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.support.drawing import BLACK, BLUE, GREY, ORANGE, VERMILLION, Plot, canvas, legend, logarithmic, name_rows, parts, style
from bench.support.figure import shown
from bench.support.report import Figure
from bench.support.result import Result, Spread, spreads, stable_name
from bench.support.row_bars import bar_plots, overview
from bench.support.row_groups import Group
from bench.support.row_plots import line_plots

#: Milliseconds of one unit of time.
_MS = {"ns": 1e-6, "µs": 1e-3, "us": 1e-3, "ms": 1.0, "s": 1e3}
_MARKERS = {0.0: "|", 50.0: "o", 95.0: "s", 99.0: "D", 100.0: "|"}
_COLOURS = {0.0: BLACK, 50.0: BLUE, 95.0: ORANGE, 99.0: VERMILLION, 100.0: BLACK}
_LABELS = {0.0: "least", 50.0: "median", 95.0: "p95", 99.0: "p99", 100.0: "greatest"}


def plots(result: Result) -> list[Plot]:
    """Every plot that the figures allow; none for figures that have nothing to draw."""
    with style():
        return [*_ratio_plots(result), *_latency_plots(result), *_cpu_plots(result)]


def overview_plots(groups: Sequence[Group]) -> list[Plot]:
    """What compares the groups of a grid."""
    with style():
        return list(overview(groups))


def group_plots(group: Group) -> list[Plot]:
    """Every plot that a group's rows allow."""
    with style():
        return [*line_plots(group), *bar_plots(group)]


def _ratio_plots(result: Result) -> Iterator[Plot]:
    bars = [(figure, figure.ratio) for figure in result.figures if figure.ratio is not None]
    for part, rows in parts(bars):
        with canvas(len(rows)) as (axes, out):
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
            name_rows(axes, [stable_name(figure) for figure, _ in rows])
            axes.set_xlabel("ratio to the ceiling of the same run (dashed: as good as the ceiling)")
            legend(
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
    for part, rows in parts(series):
        with canvas(len(rows)) as (axes, out):
            drawn = set()
            for row, (_, quantiles) in enumerate(rows):
                axes.plot([min(quantiles.values()), max(quantiles.values())], [row, row], color=GREY, linewidth=1.4, zorder=1)
                if 25.0 in quantiles and 75.0 in quantiles:
                    axes.plot([quantiles[25.0], quantiles[75.0]], [row, row], color=GREY, linewidth=7, solid_capstyle="butt", zorder=1)
                for percent, value in quantiles.items():
                    if percent in _MARKERS:
                        drawn.add(percent)
                        axes.scatter(value, row, s=34, color=_COLOURS[percent], marker=_MARKERS[percent], zorder=3)
            logarithmic(axes, axes.xaxis)
            # All parts of a plot have one scale, to be compared.
            axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
            name_rows(axes, [name for name, _ in rows])
            axes.set_xlabel("ms, logarithmic (bar: p25 to p75, where recorded)")
            legend(
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
    with canvas(16) as (axes, out):
        places = [(cpu, figure.value) for figure, cpu in points]
        axes.scatter([cpu for cpu, _ in places], [rate for _, rate in places], s=26, color=BLUE, zorder=3)
        for place, numbers in _labels(places):
            axes.annotate(numbers, place, (5, 4), textcoords="offset points", zorder=4)
        logarithmic(axes, axes.xaxis)
        logarithmic(axes, axes.yaxis)
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
