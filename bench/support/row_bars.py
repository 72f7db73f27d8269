"""Plots of a group of rows as bars and marks by path: the ratio to the ceiling, what a byte costs the host, where the time of a request went."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.support.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Plot, legend, legend_of_all, logarithmic, name_rows, panels, parts
from bench.support.figure import shown
from bench.support.row_groups import Group, commonest, least_depth, lines, ratio_told, size_of, stages_of
from bench.support.row_plots import colour, marker, panel_title
from bench.support.rows import Operation, Row

_BAR_INCHES = 0.24
#: One colour and hatch a stage, in the order in which they first appear.
_STAGE_LOOKS = ((SKY, None), (BLUE, "///"), (ORANGE, None), (GREEN, "|||"), (PURPLE, None), (VERMILLION, "---"), (GREY, None))


def overview(every: Sequence[Group]) -> Iterator[Plot]:
    """Medians of all groups at the one size that most of them have, the estimated recompute among them; none for a single group."""
    tokens = commonest(tokens for group in every for tokens in group.tokens)
    chosen = [(group.title, rows) for group in every if (rows := [row for row in least_depth(group.rows) if row.case.tokens == tokens])]
    if tokens is None or len(chosen) < 2:
        return
    found = [row for _, rows in chosen for row in rows]
    operations = [operation for operation in Operation if any(row.case.operation is operation for row in found)]
    for part, some in parts(chosen):
        with panels(1, len(operations), height_inches=1.4 + 0.3 * len(some)) as (canvas, every_axes, out):
            handles: dict[str, Line2D] = {}
            for axes, operation in zip(every_axes, operations, strict=True):
                for place, (_, rows) in enumerate(some):
                    for label, line in lines([row for row in rows if row.case.operation is operation]).items():
                        look: Any = {"color": colour(label), "marker": marker(label), "markersize": 6.5, "linewidth": 0}
                        axes.plot(line[0].figure.value, place, **look, alpha=0.9)
                        told = f"{label}, estimated" if line[0].estimated else label
                        handles.setdefault(told, Line2D([], [], **look, label=told))
                logarithmic(axes, axes.xaxis)
                # All parts and both panels of one plot on one scale, to be compared.
                axes.set_xlim(min(row.figure.value for row in found) / 1.2, max(row.figure.value for row in found) * 1.2)
                name_rows(axes, [title for title, _ in some] if axes is every_axes[0] else [""] * len(some))
                axes.set_xlabel("median latency, ms, logarithmic")
                axes.set_title(panel_title(operation, [row for row in found if row.case.operation is operation]), fontsize=9, loc="left")
            legend_of_all(canvas, list(handles.values()))
        yield Plot(f"All models at {tokens:,} tokens{part}", out[0], [])


def bar_plots(group: Group) -> Iterator[Plot]:
    """Those that have at least one bar to draw."""
    yield from _ratio_plots(group)
    yield from _cost_plot(group)
    yield from _stage_plot(group)


def _ratio_plots(group: Group) -> Iterator[Plot]:
    """A line of bars for each path, size and depth; evict and restore side by side on one scale."""
    places: dict[tuple[str, str], dict[Operation, Row]] = {}
    for operation in group.operations:
        for label, line in lines(group.of(operation)).items():
            for row in line:
                if row.ratio is not None:
                    depth = f", depth {row.case.queue_depth}" if row.case.queue_depth > 1 else ""
                    places.setdefault((label, f"{label}, {row.case.tokens:,} tokens{depth}"), {})[operation] = row
    if not places:
        return
    operations = [operation for operation in group.operations if any(operation in found for found in places.values())]
    greatest = max(row.ratio or 0 for found in places.values() for row in found.values())
    cut = list(parts(list(places.items())))
    for part, bars in cut:
        with panels(1, len(operations), height_inches=1.1 + _BAR_INCHES * len(bars)) as (_, every, out):
            for axes, operation in zip(every, operations, strict=True):
                # All parts of one plot on one scale, or bars of equal length would differ.
                axes.set_xlim(0, 1.04 * max(1.0, greatest))
                for place, ((label, _), found) in enumerate(bars):
                    if operation in found and (ratio := found[operation].ratio) is not None:
                        astray = not found[operation].is_as_asked
                        look: Any = {"hatch": "///", "edgecolor": "white"} if astray else {"edgecolor": colour(label)}
                        axes.barh(place, ratio, 0.7, color=colour(label), **look)
                        # Beside the axes: at its bar's end a number would lie on the ceiling's line.
                        axes.text(1.01, place, ratio_told(ratio), transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
                axes.axvline(1.0, color=BLACK, linewidth=0.8, linestyle="--")
                name_rows(axes, [name for (_, name), _ in bars] if axes is every[0] else [""] * len(bars))
                axes.set_xlabel("ratio to the ceiling (dashed)")
                axes.set_title(panel_title(operation, group.of(operation)), fontsize=9, loc="left")
            if any(not row.is_as_asked for _, found in bars for row in found.values()):
                _below(every[0], [Patch(facecolor=GREY, hatch="///", edgecolor="white", label="hatched: did not go the way asked for, or not all of it")])
        yield Plot(f"Ratio to ceiling{part}", out[0], list(_ceilings(group)) if part == cut[-1][0] else [])


def _ceilings(group: Group) -> Iterator[str]:
    """Which ceiling each path has, with its rates over all rows."""
    for operation in group.operations:
        for label, line in lines(group.of(operation)).items():
            for ceiling in dict.fromkeys(row.ceiling for row in line if row.ceiling):
                rates = [row.ceiling_gb_per_s for row in line if row.ceiling == ceiling and row.ceiling_gb_per_s is not None]
                if not rates:
                    yield f"{operation} by {label}: no ceiling: {ceiling}"
                    continue
                told = shown(rates[0]) if min(rates) == max(rates) else f"{shown(min(rates))} to {shown(max(rates))}"
                yield f"{operation} by {label}: ceiling is {ceiling}, {told} GB/s"


def _cost_plot(group: Group) -> Iterator[Plot]:
    """Marks of every row; the filled one is the largest request."""
    measured = [row for row in group.rows if not row.estimated]
    titles = ("CPU seconds per GB, logarithmic", "host memory bytes per byte, logarithmic")
    values = ({id(row): row.cpu_s_per_gb for row in measured}, {id(row): row.memory_bytes_per_byte or 0.0 for row in measured})
    # A logarithm takes no zero.
    columns = [(title, found) for title, each in zip(titles, values, strict=True) if (found := {key: value for key, value in each.items() if value > 0})]
    if not columns:
        return
    series = [(operation, label, line) for operation in group.operations for label, line in _measured_lines(group, operation)]
    with panels(1, len(columns), height_inches=1.2 + 0.27 * len(series)) as (_, every, out):
        for axes, (title, found) in zip(every, columns, strict=True):
            for place, (_, label, line) in enumerate(series):
                shown_rows = [row for row in line if id(row) in found]
                if not shown_rows:
                    continue
                look: Any = {"color": colour(label), "marker": marker(label), "linewidth": 0}
                largest = max(shown_rows, key=lambda row: (row.case.payload_bytes, -row.case.queue_depth))
                axes.plot([found[id(row)] for row in shown_rows], [place] * len(shown_rows), markersize=5.5, markerfacecolor="none", **look)
                axes.plot(found[id(largest)], place, markersize=8, **look)
                axes.text(1.01, place, shown(found[id(largest)]), transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
            logarithmic(axes, axes.xaxis)
            name_rows(axes, [f"{operation} by {label}" for operation, label, _ in series] if axes is every[0] else [""] * len(series))
            axes.set_xlabel(title)
        handles = [
            Line2D([], [], color=GREY, marker="o", markersize=8, linewidth=0, label="the largest request, its number at the edge"),
            Line2D([], [], color=GREY, marker="o", markersize=5.5, markerfacecolor="none", linewidth=0, label="all others"),
        ]
        legend(every[0], handles)
    notes = dict.fromkeys(row.memory_note for row in measured if row.memory_bytes_per_byte is None and row.memory_note)
    yield Plot("What a byte costs the host", out[0], [f"host memory traffic was not counted: {note}" for note in notes])


def _measured_lines(group: Group, operation: Operation) -> Iterator[tuple[str, list[Row]]]:
    yield from lines([row for row in group.of(operation) if not row.estimated]).items()


def _stage_plot(group: Group) -> Iterator[Plot]:
    """Of the largest request of each path, as shares of all stages: threads run stages at the same time, so they don't add up to the latency."""
    chosen = {}
    for operation in group.operations:
        for label, line in lines([row for row in least_depth(group.of(operation)) if sum(stages_of(row).values()) > 0]).items():
            chosen[operation, label] = max(line, key=lambda row: row.case.payload_bytes)
    if not chosen:
        return
    stages = list(dict.fromkeys(stage for row in chosen.values() for stage in stages_of(row)))
    looks = {stage: _STAGE_LOOKS[number % len(_STAGE_LOOKS)] for number, stage in enumerate(stages)}
    with panels(1, 1, height_inches=1.1 + 0.3 * len(chosen)) as (_, (axes,), out):
        for place, row in enumerate(chosen.values()):
            total, left = sum(stages_of(row).values()), 0.0
            for stage, seconds in stages_of(row).items():
                axes.barh(place, seconds / total, 0.7, left=left, color=looks[stage][0], hatch=looks[stage][1], edgecolor="white")
                left += seconds / total
            axes.text(1.01, place, f"{shown(total * 1e3)} ms in all", transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
        axes.set_xlim(0, 1)
        names = [f"{operation} by {label}, {row.case.tokens:,} tokens ({size_of(row.case.payload_bytes)})" for (operation, label), row in chosen.items()]
        name_rows(axes, names)
        axes.set_xlabel("share of all stages, by the medians of each")
        legend(axes, [Patch(facecolor=looks[stage][0], hatch=looks[stage][1], edgecolor="white", label=stage.replace("_", " ")) for stage in stages])
    yield Plot("Where the time went", out[0], [])


def _below(axes: Axes, handles: Sequence[Patch]) -> None:
    axes.figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8)
