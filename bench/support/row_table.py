"""Rows of a grid as tables for a terminal: what ran, with what an estimated recompute would have taken; and what did not, with the reasons."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bench.support.figure import number_text
from bench.support.rows import Case, Operation, Row
from bench.support.stats import Summary


def row_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One for each model, number of ranks, dtype and background of the rows that ran, one of those that did not; none that would be empty."""
    estimates = estimates_of(rows)
    sections: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.skipped:
            case = row.case
            beside = f", beside {case.background}" if case.background else ""
            sections[f"{case.model} TP{case.tensor_parallel} {case.kv_dtype}, {case.block_bytes / 1024:g} KiB blocks{beside}"].append(row)
    for title, some in sections.items():
        yield _measured(title, some, estimates)
    if any(row.skipped for row in rows):
        yield _skipped([row for row in rows if row.skipped])


def speedup(row: Row, estimates: dict[tuple[str, int, int], float]) -> float | None:
    """How much sooner a restore is there than the recompute of as many tokens would be; None for what is no measured restore, or without an estimate."""
    estimate = estimates.get(_prompt(row.case))
    if row.estimated or row.case.operation is not Operation.RESTORE or estimate is None:
        return None
    return estimate / Summary.of(row.seconds).median


def estimates_of(rows: Sequence[Row]) -> dict[tuple[str, int, int], float]:
    """Seconds of the estimated recomputes by model, ranks and tokens."""
    return {_prompt(row.case): row.seconds[0] for row in rows if row.estimated and not row.skipped}


def _prompt(case: Case) -> tuple[str, int, int]:
    return case.model, case.tensor_parallel, case.tokens


def _measured(title: str, rows: Sequence[Row], estimates: dict[tuple[str, int, int], float]) -> Table:
    table = _table(title)
    table.add_column("operation", no_wrap=True)
    table.add_column("path", no_wrap=True)
    table.add_column("way", overflow="fold")
    for name in ("tokens", "depth", "ms p50", "p95", "p99", "GB/s", "ceiling", "of it", "CPU s/GB", "memory B/B", "× sooner"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        _add(table, row, estimates)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _add(table: Table, row: Row, estimates: dict[tuple[str, int, int], float]) -> None:
    case, summary, sooner = row.case, Summary.of(row.seconds), speedup(row, estimates)
    devices = f" {case.gpu_count} GPUs, {case.volume_count} volumes" if case.gpu_count > 1 or case.volume_count > 1 else ""
    table.add_row(
        f"{case.operation} {case.ack}".strip(),
        escape(f"{case.path}{' (GPU)' if case.gpu_count and case.path == 'ddr' else ''}{devices}"),
        escape(_way(row)),
        f"{case.tokens:,}",
        str(case.queue_depth),
        *(number_text(value * 1e3) for value in (summary.median, summary.p95, summary.p99)),
        number_text(row.gb_per_s),
        "" if row.ceiling_gb_per_s is None else number_text(row.ceiling_gb_per_s),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.estimated else number_text(row.cpu_s_per_gb),
        "" if row.memory_bytes_per_byte is None else f"{row.memory_bytes_per_byte:.2f}",
        "" if sooner is None else number_text(sooner),
        style="dim" if row.estimated else "",
    )


def _way(row: Row) -> str:
    """What was proven; shares only where there is more than one way."""
    return next(iter(row.proven)) if len(row.proven) == 1 else str(row.figure.detail["way"])


def _skipped(rows: Sequence[Row]) -> Table:
    """Grouped by reason: a machine without a GPU has the same one for many."""
    by_reason: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_reason[row.skipped].append(row)
    table = _table("Not run on this machine")
    table.add_column("rows", justify="right")
    table.add_column("paths")
    table.add_column("why", overflow="fold")
    for reason, some in by_reason.items():
        table.add_row(str(len(some)), ", ".join(dict.fromkeys(row.case.path for row in some)), escape(reason))
    return table
