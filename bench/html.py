"""One page that shows what benchmarks measured: it fetches nothing, needs no JavaScript and can be printed.

Exit status: 0 written, 2 not.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from bench.support.figure import fact_text, shown
from bench.support.report import TINY_MEANS_NOTHING, Figure
from bench.support.result import Result, ResultError, read_result, spreads, texts
from bench.support.row_groups import Group
from bench.support.row_page import grid
from bench.support.rows import counted

if TYPE_CHECKING:
    from bench.support.drawing import Plot

#: Blue and vermillion differ for colour-blind eyes, and the word and the sign beside them do without colour.
_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, "DejaVu Sans", Arial, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.6rem 0 .2rem; border-top: 2px solid #1a1a1a; padding-top: .7rem }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem } h4 { font-size: .95rem; margin: 1.3rem 0 .3rem }
p { margin: .3rem 0 } .soft, small { color: #555 } .name { font-weight: 400; color: #555 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .28rem .6rem; border-bottom: 1px solid #ccc } thead th { border-bottom: 2px solid #1a1a1a }
table.facts { width: auto } table.facts th { font-weight: 400; color: #555; white-space: nowrap }
.number { text-align: right; white-space: nowrap } td > small { display: block } td:first-child { overflow-wrap: anywhere }
.met { color: #00558a; font-weight: 600; white-space: nowrap } .missed { color: #a84300; font-weight: 600; white-space: nowrap }
.caution { border: 2px solid #a84300; padding: .5rem .8rem; font-weight: 600 }
figure { margin: 0; overflow-x: auto } svg { max-width: 100%; height: auto } pre { white-space: pre-wrap; background: #f4f4f4; padding: .6rem }
ol.key { columns: 2; column-gap: 3rem; font-size: .85rem }
.scroll { overflow-x: auto }
summary { cursor: pointer; padding: .25rem 0 } details.group { border-top: 1px solid #888; margin-top: 1rem } details.group > summary { font-weight: 600 }
table.grid { font-size: .82rem } table.grid th, table.grid td { padding: .2rem .4rem } table.grid td:first-child { min-width: 15rem }
table.grid .number small { white-space: normal; max-width: 10rem; margin-left: auto }
td.astray { color: #a84300; font-weight: 600 }
@media print { body { font-size: 10px; margin: 0; max-width: none } tr, figure, svg { break-inside: avoid }
  h2, h3, h4, summary { break-after: avoid } ol.key, p, li { font-size: 9px } thead { display: table-header-group }
  .scroll { overflow: visible } svg { max-height: 24cm }
  details::details-content { content-visibility: visible; block-size: auto; height: auto } table.grid { font-size: 8px }
  table.grid td:first-child { min-width: 5cm } table.grid .number small { max-width: 2.4cm } }
"""


@dataclass(frozen=True, slots=True)
class Drawer:
    """Draws the plots of a result's figures, of all groups of its rows together, and of one group."""

    figures: Callable[[Result], list["Plot"]]
    overview: Callable[[Sequence[Group]], list["Plot"]]
    group: Callable[[Group], list["Plot"]]


def page(results: Sequence[Result], drawer: Drawer) -> str:
    """The whole page."""
    numbers = count(1)

    def drawn(plots: list["Plot"]) -> str:
        return "".join(_drawing(plot, f"plot{next(numbers)}-") for plot in plots)

    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>offloadd: measured</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>offloadd: measured</h1>\n",
        "<p class=soft>A ceiling was measured in the same run as the figure beside it; a ratio of 1 is as good as the ceiling.</p>\n",
        *_machine(results),
    ]
    for result in results:
        parts += _section(result)
        parts.append(drawn(drawer.figures(result)))
        parts += grid(
            result.rows,
            overview=lambda groups: drawn(drawer.overview(groups)),
            plots=lambda group: drawn(drawer.group(group)),
            recompute=str(result.facts.get("recompute", "")),
        )
        parts += _said(result)
    return "".join([*parts, "</body>\n</html>\n"])


def _machine(results: Sequence[Result]) -> Iterator[str]:
    """A fact that all results share is told once."""
    yield "<h3>Machine</h3>\n<div class=scroll><table class=facts>\n"
    for fact in dict.fromkeys(fact for result in results for fact in result.machine):
        values: dict[str, list[str]] = {}
        for result in results:
            values.setdefault(fact_text(result.machine.get(fact)), []).append(result.name)
        told = [escape(value) + ("" if len(values) == 1 else f" <span class=soft>({escape(', '.join(names))})</span>") for value, names in values.items()]
        yield f"<tr><th scope=row>{escape(fact.replace('_', ' '))}</th><td>{'<br>'.join(told)}</td></tr>\n"
    yield "</table></div>\n"


def _section(result: Result) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(result.question)} <span class=name>{escape(result.name)}</span></h2>\n"
    if result.tiny:
        yield f"<p class=caution>{TINY_MEANS_NOTHING}</p>\n"
    if result.figures or not result.rows:
        yield from _figures(result)


def _figures(result: Result) -> Iterator[str]:
    verdicts = [figure.met for figure in result.figures if figure.met is not None and not result.tiny]
    met = f"; {sum(verdicts)} of {len(verdicts)} targets met" if verdicts else ""
    yield f"<p>{counted(len(result.figures), 'figure')}{met}.</p>\n"
    yield "<div class=scroll><table>\n<thead><tr><th>figure</th><th class=number>measured</th><th class=number>expected</th><th class=number>ceiling</th>"
    yield "<th class=number>of ceiling</th><th class=number>target</th><th></th></tr></thead>\n<tbody>\n"
    for figure in result.figures:
        yield _row(figure, None if result.tiny else figure.met)
    yield "</tbody>\n</table></div>\n"


def _row(figure: Figure, met: bool | None) -> str:
    lines = [f"expected: {figure.sketch}"] if figure.sketch else []
    lines += [f"{name}: {value}" for name, value in texts(figure).items()]
    for spread in spreads(figure):
        words = {0.0: "least", 50.0: "median", 100.0: "greatest"}
        told = ", ".join(f"{words.get(percent, f'p{percent:g}')} {shown(value)}" for percent, value in spread.quantiles.items())
        lines.append(f"{spread.prefix.removesuffix('_').replace('_', ' ')} {told}".strip())
    return (
        f"<tr><td>{escape(figure.name)}{''.join(f'<small>{escape(line)}</small>' for line in lines)}</td>"
        f"<td class=number>{escape(f'{shown(figure.value)} {figure.unit}')}</td>{_number(figure.expected)}{_number(figure.ceiling)}"
        f"<td class=number>{'' if figure.ratio is None else f'{figure.ratio:.2f}'}</td>"
        f"<td class=number>{'' if figure.target is None else escape(str(figure.target))}</td>{_VERDICTS[met]}</tr>\n"
    )


_VERDICTS = {None: "<td></td>", True: "<td class=met>✓ met</td>", False: "<td class=missed>✗ missed</td>"}


def _number(value: float | None) -> str:
    return f"<td class=number>{'' if value is None else shown(value)}</td>"


def _drawing(plot: "Plot", prefix: str) -> str:
    """Ids are the page's, not the drawing's: each plot gets its own."""
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", plot.svg).replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)
    key = f"<figcaption><ol class=key>{''.join(f'<li>{escape(line)}</li>' for line in plot.key)}</ol></figcaption>" if plot.key else ""
    return f"<h4>{escape(plot.title)}</h4>\n<figure>{svg}{key}</figure>\n"


def _said(result: Result) -> Iterator[str]:
    """Facts and notes: among them why rows are missing that this machine couldn't run."""
    if result.facts or result.notes:
        yield "<h3>What the run noted, with reasons where rows are missing</h3>\n"
    if result.facts:
        rows = (f"<tr><th scope=row>{escape(name.replace('_', ' '))}</th><td>{escape(fact_text(value))}</td></tr>\n" for name, value in result.facts.items())
        yield f"<div class=scroll><table class=facts>\n{''.join(rows)}</table></div>\n"
    for name, lines in result.notes.items():
        yield f"<h4>{escape(name)}</h4>\n<pre>{escape(chr(10).join(lines))}</pre>\n"
    yield "</section>\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.html", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="what benchmarks wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    options = parser.parse_args(arguments)
    try:
        from bench.support.plots import group_plots, overview_plots, plots
    except ModuleNotFoundError as error:
        print(f"bench.html: {error.name} is not installed, and it draws the plots: pip install 'offloadd[bench]'", file=sys.stderr)
        return 2
    try:
        text = page([read_result(path) for path in options.results], Drawer(plots, overview_plots, group_plots))
        options.output.write_text(text, encoding="utf-8")
    except ResultError as error:
        print(f"bench.html: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench.html: {options.output} can't be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
