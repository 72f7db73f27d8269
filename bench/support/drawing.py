"""What all plots share: colours, the canvas and its SVG, logarithmic scales, legends. Needs matplotlib, the `bench` extra.

Colours are of Okabe and Ito's palette, which colour-blind readers tell apart; markers and hatches say the same in grey print.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator

from bench.support.figure import shown

BLUE, VERMILLION, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
GREY, BLACK = "#999999", "#222222"
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
#: Over more, labels between the powers of ten lie on each other.
_DECADES_OF_MINOR_LABELS = 2.6
_DECADES_OF_ROUND_NUMBERS = 0.5
#: Of a legend: a letter, on the wide side, and the line or patch with its spaces.
_LETTER_INCHES, _HANDLE_INCHES = 0.073, 0.65

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing. `key` explains the numbers in it, in order."""

    title: str
    svg: str
    key: list[str]


def logarithmic(axes: Axes, axis: Axis) -> None:
    """With labels between the powers of ten, as many as there is room for: a scale within one decade would have one label or none."""
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    axis.set_major_locator(_PowersOfTen())
    axis.set_minor_locator(_Between())
    axis.set_major_formatter(lambda value, _: shown(value))
    axis.set_minor_formatter(lambda value, _: shown(value) if f"{value:.0e}"[0] in _minor_digits(axis) else "")
    axis.set_tick_params(which="minor", labelsize=7.5)
    axis.grid(which="both", color="#e2e2e2", linewidth=0.6)


class _PowersOfTen(LogLocator):
    """Over less than half a decade there may be none: then round numbers, evenly."""

    def __call__(self) -> Any:
        if _decades(self.axis) < _DECADES_OF_ROUND_NUMBERS:
            return MaxNLocator(5).tick_values(*_interval(self.axis))
        return super().__call__()


class _Between(LogLocator):
    """None where the major ticks are round numbers already."""

    def __init__(self) -> None:
        super().__init__(subs=tuple(range(2, 10)))

    def __call__(self) -> Any:
        return [] if _decades(self.axis) < _DECADES_OF_ROUND_NUMBERS else super().__call__()


def _minor_digits(axis: Axis) -> str:
    decades = _decades(axis)
    return "23457" if decades < 1.2 else "25" if decades <= _DECADES_OF_MINOR_LABELS else ""


def _decades(axis: Any) -> float:
    low, high = _interval(axis)
    return math.log10(high / low) if low > 0 else math.inf


def _interval(axis: Any) -> tuple[float, float]:
    low, high = axis.get_view_interval()
    return low, high


def parts(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Rows in parts of even length, none longer than the limit, and what to add to the title."""
    count = -(-len(rows) // _ROWS_MAX)
    for part in range(count):
        title = "" if count == 1 else f" ({part + 1} of {count})"
        yield title, rows[len(rows) * part // count : len(rows) * (part + 1) // count]


@contextmanager
def canvas(row_count: int) -> Iterator[tuple[Axes, list[str]]]:
    """Axes with room for so many rows; afterwards the list holds the SVG element."""
    with panels(1, 1, height_inches=1.1 + 0.34 * row_count) as (_, (axes,), out):
        yield axes, out


@contextmanager
def panels(row_count: int, column_count: int, *, height_inches: float) -> Iterator[tuple[Canvas, list[Axes], list[str]]]:
    """A canvas, its axes row by row, and a list that afterwards holds the SVG element. Several panels are laid out so that no text lies on another's."""
    canvas = Canvas(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    axes = [canvas.add_subplot(row_count, column_count, number + 1) for number in range(row_count * column_count)]
    out: list[str] = []
    yield canvas, axes, out
    text = StringIO()
    canvas.savefig(text, format="svg", metadata=_METADATA)
    out.append(_inline(text.getvalue()))


def style() -> AbstractContextManager[None]:
    """What plots look like, while it lasts."""
    return matplotlib.rc_context(_STYLE)


def _inline(document: str) -> str:
    """The SVG element as HTML wants it: without prolog and namespaces, which would be the page's only addresses."""
    element = document[document.index("<svg") :]
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """The first row on top."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 52) for name in names], fontsize=7.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """In one line above the axes."""
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(handles), frameon=False, borderaxespad=0.2)


def legend_of_all(canvas: Canvas, handles: Sequence[Artist]) -> None:
    """Above all panels, in as many columns as the canvas is wide enough for."""
    widths = [len(str(handle.get_label())) * _LETTER_INCHES + _HANDLE_INCHES for handle in handles]
    columns = next(count for count in range(len(widths), 0, -1) if count == 1 or _width(widths, count) <= _WIDTH_INCHES)
    canvas.legend(handles=list(handles), loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5)


def _width(widths: Sequence[float], column_count: int) -> float:
    """A column is as wide as its widest entry; entries go down the columns, the first columns taking one more."""
    least, more = divmod(len(widths), column_count)
    ends = [number * least + min(number, more) for number in range(column_count + 1)]
    return sum(max(widths[begin:end]) for begin, end in itertools.pairwise(ends))
