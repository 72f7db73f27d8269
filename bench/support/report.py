"""The record of one benchmark: figures with what was expected and what the ceiling was, and rows of a grid, as tables and as JSON."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.support.figure import Detail, Figure, Target, shown
from bench.support.machine import ROOT, machine_record
from bench.support.row_table import row_tables
from bench.support.rows import Row
from bench.support.stats import Summary

__all__ = ["Detail", "Figure", "Report", "Target", "benchmark", "seconds_figure"]


#: Of a run with --tiny, wherever its figures are shown.
TINY_MEANS_NOTHING = "Caution: a tiny run, which shows that the benchmark works and nothing else. Its figures mean nothing."


class Report:
    """Collects figures and rows and, at the end, prints and writes them. `arguments`: the whole command line."""

    def __init__(self, name: str, question: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.question = question
        self.arguments = arguments
        self.directory: Path = arguments.dir
        self.tiny: bool = arguments.tiny
        self.results: Path = arguments.results
        self.figures: list[Figure] = []
        self.rows: list[Row] = []
        self.facts: Detail = {}
        #: Longer texts, for the file alone.
        self.notes: dict[str, str] = {}
        terminal = Console(highlight=False)
        self._console = terminal if terminal.is_terminal else Console(highlight=False, width=140)

    def add(self, figure: Figure) -> None:
        """One more figure."""
        self.figures.append(figure)

    def add_row(self, row: Row) -> None:
        """One more row. Raises ValueError if its case is in the report already: rows are compared by the names of their cases."""
        if any(other.case.name == row.case.name for other in self.rows):
            raise ValueError(f"the case {row.case.name!r} was reported already")
        self.rows.append(row)

    def say(self, text: str) -> None:
        """Tell what goes on."""
        self._console.print(f"[dim]{text}[/dim]")

    def finish(self, *, fault: str = "") -> None:
        """Print the tables and write `NAME.json`. With `fault`, which ended the run: `NAME.partial.json`, so that an older whole result is left alone."""
        if fault:
            self.facts["ended_by"] = fault
        machine = machine_record(self.directory)
        record = {
            "name": self.name,
            "question": self.question,
            "tiny": self.tiny,
            "machine": machine,
            "facts": self.facts,
            "notes": {name: text.splitlines() for name, text in self.notes.items()},
            "figures": [{**asdict(figure), "met": figure.met} for figure in self.figures],
            "rows": [msgspec.to_builtins(row) for row in self.rows],
        }
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / (f"{self.name}.partial.json" if fault else f"{self.name}.json")
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        if self.figures:
            self._console.print(self._table())
        elif not self.rows:
            self._console.print(f"[bold]{self.question}[/bold] No figures: the machine can't, for the reasons above.")
        for table in row_tables(self.rows):
            self._console.print(table)
        if self.tiny:
            self._console.print(TINY_MEANS_NOTHING, style="bold red")
        self._console.print(", ".join(f"{name} {value}" for name, value in (machine | self.facts).items()), style="dim")
        self._console.print(f"written to {path}", style="dim")

    def _table(self) -> Table:
        table = Table(title=self.question, title_justify="left", title_style="bold")
        table.add_column("figure", overflow="fold", min_width=30)
        for name in ("measured", "expected", "ceiling", "of ceiling", "target"):
            table.add_column(name, justify="right")
        table.add_column("")
        for figure in self.figures:
            table.add_row(
                figure.name,
                f"{shown(figure.value)} {figure.unit}",
                _optional(figure.expected),
                _optional(figure.ceiling),
                "" if figure.ratio is None else f"{figure.ratio:.2f}",
                "" if figure.target is None else str(figure.target),
                {None: "", True: "[green]met[/green]", False: "[red]missed[/red]"}[None if self.tiny else figure.met],
            )
        return table


def _optional(value: float | None) -> str:
    return "" if value is None else shown(value)


@contextmanager
def benchmark(
    name: str,
    question: str,
    *,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] | None = None,
    arguments: Sequence[str] | None = None,
) -> Iterator[Report]:
    """Parse the command line, run the body, and report; volumes are made in a directory of their own that goes afterwards.

    `add_options` adds the benchmark's own options; `check` refuses combinations of them, by `ArgumentParser.error`, before anything is made.
    """
    parser = argparse.ArgumentParser(prog=f"bench.{name}", description=question)
    parser.add_argument("--tiny", action="store_true", help="a run of seconds that proves nothing but that the benchmark works")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench" / "results", help="where volumes are made and removed again (default: bench/results)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where NAME.json goes (default: bench/results)")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args(arguments)
    if check is not None:
        check(parser, options)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=options.dir) as directory:
        options.dir = Path(directory)
        report = Report(name, question, options)
        try:
            yield report
        except BaseException as error:
            # Hours of measurements must not go with the last of them.
            if report.figures or report.rows:
                report.finish(fault=f"{type(error).__name__}: {error}")
            raise
        report.finish()


def seconds_figure(name: str, summary: Summary, *, expected: float | None = None, sketch: str = "", target_s: float | None = None) -> Figure:
    """A latency in milliseconds: its median, with the rest of the summary as detail."""
    return Figure(
        name=name,
        value=summary.median * 1e3,
        unit="ms",
        expected=None if expected is None else expected * 1e3,
        sketch=sketch,
        target=None if target_s is None else Target(target_s * 1e3, at_least=False),
        detail=summary.detail(1e3),
    )
