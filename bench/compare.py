"""Is a newer result of a benchmark worse than an older one, beyond what its figures vary by themselves?

Exit status: 0 nothing is worse, 1 something is or can't be measured any more, 2 the files can't be compared.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.support.comparison import Basis, Compared, Comparison, Verdict, compare
from bench.support.figure import shown
from bench.support.result import Result, ResultError, read_result

_STYLES = {
    Verdict.BETTER: "green",
    Verdict.WORSE: "bold red",
    Verdict.WITHIN_NOISE: "",
    Verdict.CEILING: "dim",
    Verdict.ESTIMATE: "dim",
    Verdict.NOT_COMPARABLE: "yellow",
}


def band(text: str) -> float:
    """Parse --noise."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no band: a number from 0 up, 0.1 for a tenth")
    return value


def record(old: Result, new: Result, found: Comparison, noise: float) -> dict[str, object]:
    """For --json: the same as the table."""
    return {
        "name": new.name,
        "noise": noise,
        "old": {"commit": old.machine.get("commit"), "date": old.machine.get("date")},
        "new": {"commit": new.machine.get("commit"), "date": new.machine.get("date")},
        "worse": found.worse,
        "warnings": found.warnings,
        "figures": [{**asdict(figure), "ratio": figure.ratio} for figure in found.figures],
        "only_old": found.only_old,
        "only_new": found.only_new,
        "lost": found.lost,
        "skips": found.skips,
    }


def tell(console: Console, old: Result, new: Result, found: Comparison) -> None:
    """Warnings first, then the table, then what could not be compared."""
    for result, which in ((old, "old"), (new, "new")):
        console.print(escape(f"{which}: {result.name}, commit {result.machine.get('commit', 'unknown')}, {result.machine.get('date', 'no date')}"))
    for warning in found.warnings:
        console.print(f"[bold red]CAUTION[/bold red] {escape(warning)}")
    console.print(_table(found.figures))
    if any(figure.basis is Basis.RATIO for figure in found.figures):
        console.print("Figures of kind “ratio to ceiling” are compared by that ratio and not by their value, since machines drift.", style="dim")
    console.print(
        "noise: the widest of --noise and the spread that either result tells of the figure, or of its ratio where that is compared (half of p75 - p25, or the "
        "MAD, by the median). "
        "A row that went another way than asked, and did not before, is worse whatever its speed; so is what was measured and can't be any more.",
        style="dim",
    )
    for title, names in (("only in the old result", found.only_old), ("only in the new result", found.only_new)):
        for name in names:
            console.print(f"[yellow]{title}:[/yellow] {escape(name)}")
    for told in found.lost:
        console.print(f"[bold red]lost:[/bold red] {escape(told)}")
    for told in found.skips:
        console.print(f"[yellow]not run in both:[/yellow] {escape(told)}")
    counts = {verdict: sum(figure.verdict is verdict for figure in found.figures) for verdict in Verdict}
    words = [f"{count} {verdict}" for verdict, count in counts.items() if count] + ([f"{len(found.lost)} lost"] if found.lost else [])
    console.print(", ".join(words), style="bold red" if found.worse else "bold")


def _table(figures: list[Compared]) -> Table:
    table = Table(title_justify="left")
    table.add_column("figure", overflow="fold", min_width=30)
    for name in ("kind", "old", "new", "new / old", "noise"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    table.add_column("")
    for figure in figures:
        unit = "" if figure.basis is Basis.RATIO else f" {figure.unit}"
        style = _STYLES[figure.verdict]
        words = "; ".join([figure.verdict, *figure.remarks])
        table.add_row(
            escape(figure.name),
            figure.basis,
            shown(figure.old) + escape(unit),
            shown(figure.new) + escape(unit),
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            f"± {figure.noise:.0%}",
            f"[{style}]{escape(words)}[/{style}]" if style else escape(words),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD.json", help="the result to compare with")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="the result to judge")
    parser.add_argument("--noise", type=band, default=0.1, help="changes up to this mean nothing, even where a figure's own spread is narrower (default: 0.1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        old, new = read_result(options.old), read_result(options.new)
        if old.name != new.name:
            raise ResultError(f"{options.old} is a result of {old.name}, {options.new} one of {new.name}: they have nothing to compare")
        found = compare(old, new, noise=options.noise)
        if not found.figures and not found.skips and not found.lost:
            raise ResultError(
                f"{options.old} and {options.new} have no figure in common: {len(old.figures)} and {len(new.figures)} figures, "
                f"{len(old.rows)} and {len(new.rows)} rows"
            )
    except ResultError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(record(old, new, found, options.noise), indent=2, ensure_ascii=False))
    else:
        terminal = Console(highlight=False)
        tell(terminal if terminal.is_terminal else Console(highlight=False, width=160), old, new, found)
    return 1 if found.worse else 0


if __name__ == "__main__":
    sys.exit(main())
