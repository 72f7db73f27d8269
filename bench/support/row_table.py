"""Rows of a grid as tables for a terminal: what ran, with what an estimated recompute would have taken; and what did not, with the reasons."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bench.support.figure import shown
from bench.support.rows import Prompt, Row, estimates_of, speedup
from bench.support.stats import FEW, Summary


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


def _measured(title: str, rows: Sequence[Row], estimates: Mapping[Prompt, float]) -> Table:
    table = _table(title)
    table.add_column("operation", no_wrap=True)
    table.add_column("path", no_wrap=True)
    table.add_column("way", overflow="fold")
    for name in ("tokens", "depth", "ms p50", "p95", "p99", "GB/s", "ceiling", "of it", "CPU s/GB", "memory B/B", "recompute"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        _add(table, row, estimates)
    table.caption, table.caption_justify = " ".join(_caption(rows, estimates)), "left"
    return table


def _caption(rows: Sequence[Row], estimates: Mapping[Prompt, float]) -> Iterator[str]:
    if any(not row.estimated and row.request_count < FEW for row in rows):
        yield f"* of fewer than {FEW} requests the p99 is the slowest."
    told = [row.case for row in rows if speedup(row, estimates) is not None]
    if told:
        yield "recompute: how many times as long as the restore the estimated recompute would take."
    if any(case.rank_count < case.tensor_parallel for case in told):
        yield f"It would be on the GPUs of all {told[0].tensor_parallel} ranks; the restore is of fewer ranks' blocks, and no other ranks restore beside it."


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _add(table: Table, row: Row, estimates: Mapping[Prompt, float]) -> None:
    case, summary, sooner = row.case, Summary.of(row.seconds), speedup(row, estimates)
    devices = f" {case.gpu_count} GPUs, {case.volume_count} volumes" if case.gpu_count > 1 or case.volume_count > 1 else ""
    table.add_row(
        f"{case.operation} {case.ack}".strip(),
        escape(f"{case.path}{' (GPU)' if case.gpu_count and case.path == 'ddr' else ''}{devices}"),
        escape(_way(row)),
        f"{case.tokens:,}",
        str(case.queue_depth),
        shown(summary.median * 1e3),
        "" if row.estimated else shown(summary.p95 * 1e3),
        "" if row.estimated else shown(summary.p99 * 1e3) + ("*" if row.request_count < FEW else ""),
        shown(row.gb_per_s),
        "" if row.ceiling_gb_per_s is None else shown(row.ceiling_gb_per_s),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.estimated else shown(row.cpu_s_per_gb),
        "" if row.memory_bytes_per_byte is None else f"{row.memory_bytes_per_byte:.2f}",
        "" if sooner is None else f"{shown(sooner)} ×",
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
