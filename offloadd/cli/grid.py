"""Rows in columns of fixed widths, cropped to a line each: for a view that may never be wider or higher than its terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from offloadd.cli.tables import plain

ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Column:
    """`width` cells; 0: what the others leave. `keep`: which end of a text stays that is too long; of a path the last part tells most."""

    title: str
    width: int = 0
    right: bool = True
    keep: Literal["start", "end"] = "start"


def crop(text: Text, width: int, keep: Literal["start", "end"] = "start") -> Text:
    """At most so many cells of a text."""
    if text.cell_len <= width:
        return text
    if width <= len(ELLIPSIS):
        return Text(ELLIPSIS[:width])
    if keep == "start":
        cropped = text.copy()
        cropped.truncate(width, overflow="ellipsis")
        return cropped
    cropped = text.copy()
    while cropped.cell_len > width - len(ELLIPSIS):
        cropped = cropped[1:]
    return Text(ELLIPSIS) + cropped


def grid(columns: Sequence[Column], rows: Sequence[Sequence[Text | str]], width: int) -> list[Text]:
    """The titles and the rows, a line each, a space between two columns."""
    fixed = sum(column.width for column in columns) + len(columns) - 1
    flexible = [column for column in columns if not column.width]
    share = max(0, width - fixed) // len(flexible) if flexible else 0
    lines = [_line(columns, [Text(column.title, style="dim") for column in columns], share)]
    lines += [_line(columns, [cell if isinstance(cell, Text) else plain(cell) for cell in row], share) for row in rows]
    return [crop(line, width) for line in lines]


def _line(columns: Sequence[Column], cells: Sequence[Text], share: int) -> Text:
    line = Text(no_wrap=True)
    for number, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        size = column.width or share
        shown = crop(cell, size, column.keep)
        gap = " " * (size - shown.cell_len)
        line.append(" " if number else "")
        line.append_text(Text(gap) + shown if column.right else shown + Text(gap))
    return line


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """How many of `total` lines each of several lists gets: what it wants, and where that is too much in all, as even a share as there can be."""
    shares = [0] * len(wanted)
    left = total
    while left > 0 and (open_ones := [number for number, want in enumerate(wanted) if shares[number] < want]):
        for number in open_ones[:left]:
            shares[number] += 1
            left -= 1
    return shares
