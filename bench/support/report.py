"""The record of one benchmark: figures with what was expected and what the ceiling was, as a table and as JSON."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.support.machine import ROOT, machine_record
from bench.support.stats import Summary

Detail = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Target:
    """What is promised of a figure: of its value, or of its ratio to the ceiling."""

    limit: float
    at_least: bool = True
    on_ratio: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {_number(self.limit)}{' of ceiling' if self.on_ratio else ''}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure in `unit`. `expected` was worked out before (`sketch` says how); `ceiling` was measured in the same run, interleaved.

    `ratio` is that to the ceiling, 1 being as good as it.
    """

    name: str
    value: float
    unit: str
    expected: float | None = None
    sketch: str = ""
    ceiling: float | None = None
    ratio: float | None = None
    target: Target | None = None
    detail: Detail = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        value = self.ratio if self.target.on_ratio else self.value
        assert value is not None, self.name
        return value >= self.target.limit if self.target.at_least else value <= self.target.limit


class Report:
    """Collects figures and, at the end, prints and writes them."""

    def __init__(self, name: str, question: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.question = question
        self.directory: Path = arguments.dir
        self.tiny: bool = arguments.tiny
        self.results: Path = arguments.results
        #: With the benchmark's own options.
        self.arguments = arguments
        self.figures: list[Figure] = []
        self.facts: Detail = {}
        #: Longer texts, for the file alone.
        self.notes: dict[str, str] = {}
        terminal = Console(highlight=False)
        self._console = terminal if terminal.is_terminal else Console(highlight=False, width=140)

    def add(self, figure: Figure) -> None:
        """One more figure."""
        self.figures.append(figure)

    def say(self, text: str) -> None:
        """Tell what goes on."""
        self._console.print(f"[dim]{text}[/dim]")

    def finish(self) -> None:
        """Print the table and write `NAME.json`."""
        machine = machine_record(self.directory)
        record = {
            "name": self.name,
            "question": self.question,
            "tiny": self.tiny,
            "machine": machine,
            "facts": self.facts,
            "notes": {name: text.splitlines() for name, text in self.notes.items()},
            "figures": [{**asdict(figure), "met": figure.met} for figure in self.figures],
        }
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / f"{self.name}.json"
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        self._console.print(self._table())
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
                f"{_number(figure.value)} {figure.unit}",
                _optional(figure.expected),
                _optional(figure.ceiling),
                "" if figure.ratio is None else f"{figure.ratio:.2f}",
                "" if figure.target is None else str(figure.target),
                {None: "", True: "[green]met[/green]", False: "[red]missed[/red]"}[figure.met],
            )
        return table


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _optional(value: float | None) -> str:
    return "" if value is None else _number(value)


@contextmanager
def benchmark(name: str, question: str, add_options: Callable[[argparse.ArgumentParser], None] | None = None) -> Iterator[Report]:
    """Parse the command line, run the body, and report; volumes are made in a directory of their own that goes afterwards.

    `add_options`: adds options of the benchmark's own, which are then in `arguments`.
    """
    parser = argparse.ArgumentParser(prog=f"bench.{name}", description=question)
    parser.add_argument("--tiny", action="store_true", help="a run of seconds that proves nothing but that the benchmark works")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench" / "results", help="where volumes are made and removed again (default: bench/results)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where NAME.json goes (default: bench/results)")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=arguments.dir) as directory:
        arguments.dir = Path(directory)
        report = Report(name, question, arguments)
        yield report
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
