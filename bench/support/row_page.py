"""The rows of a grid as HTML: what went another way than asked, each group with its plots and its table, and what this machine couldn't run."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape

from bench.support.figure import shown
from bench.support.row_groups import Group, groups, lines, ratio_told, size_of, stages_of, title_of
from bench.support.rows import Operation, Row, counted, estimates_of, speedup
from bench.support.stats import FEW, Summary

#: Groups up to which all are open; of more only the first is, or nobody finds the others.
_OPEN_GROUPS_MAX = 3
#: Rows up to which a table is open.
_OPEN_ROWS_MAX = 30

_COLUMNS = (
    "<th>asked</th><th class=number>tokens</th><th class=number>depth</th><th>proven way</th><th class=number>p50<br>ms</th><th class=number>p95<br>ms</th>"
    "<th class=number>p99<br>ms</th><th class=number>GB/s</th><th class=number>ceiling<br>GB/s</th><th class=number>of<br>ceiling</th>"
    "<th class=number>CPU<br>s/GB</th><th class=number>memory<br>B/B</th><th class=number>recompute<br>takes</th>"
)


def grid(rows: Sequence[Row], *, overview: Callable[[Sequence[Group]], str], plots: Callable[[Group], str], recompute: str = "") -> Iterator[str]:
    """HTML of all rows; `overview` and `plots` draw, as HTML. `recompute`: what the estimates rest on. Nothing without rows."""
    if not rows:
        return
    ran = [row for row in rows if not row.skipped]
    skipped = [row for row in rows if row.skipped]
    every = groups(rows)
    estimated = sum(row.estimated for row in ran)
    told = f"{len(ran) - estimated:,} measured, {estimated:,} estimated, {len(skipped):,} not run on this machine"
    yield f"<h3>The grid</h3>\n<p>{counted(len(rows), 'row')}: {told}.</p>\n"
    if estimated:
        yield f"<p>Recompute is {escape(recompute or 'estimated; the run does not say from what')}.</p>\n"
    yield from _astray([row for row in ran if not row.is_as_asked])
    yield overview(every)
    for number, group in enumerate(every):
        yield from _group(group, plots(group), is_open=number == 0 or len(every) <= _OPEN_GROUPS_MAX)
    yield from _skipped(skipped)


def _astray(rows: Sequence[Row]) -> Iterator[str]:
    """First, and never folded away by the group that they are in: what these rows show is not what was asked for."""
    if not rows:
        return
    yield f"<p class=caution>{counted(len(rows), 'row')} did not go the way asked for, or not all of it: what is shown of them is not that path.</p>\n"
    yield f"<details{_open(len(rows) <= _OPEN_ROWS_MAX)}><summary>Which</summary>\n<ul>\n"
    for row in rows:
        yield f"<li>{escape(row.case.name)}: <span class=missed>{escape(way_told(row))}</span></li>\n"
    yield "</ul></details>\n"


def way_told(row: Row) -> str:
    """The way that the bytes went, and what was asked where that is another."""
    if row.estimated:
        return "estimated"
    ways = ", ".join(way if share == 1 else f"{way} {_share(share)}" for way, share in sorted(row.proven.items(), key=lambda found: -found[1]))
    if row.is_as_asked:
        return ways
    return f"✗ asked {row.case.path}, went {ways}" if ways else f"✗ asked {row.case.path}, nothing is proven"


def _share(share: float) -> str:
    """Never 0 % or 100 % of what is not."""
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.2%}" if 0.0001 <= share <= 0.9999 else "< 0.01%" if share < 0.5 else "> 99.99%"


def _group(group: Group, drawings: str, *, is_open: bool) -> Iterator[str]:
    astray = sum(not row.is_as_asked for row in group.rows)
    marked = f" <span class=missed>✗ {astray} not as asked</span>" if astray else ""
    yield f"<details class=group{_open(is_open)}><summary>{escape(group.title)} <span class=name>{counted(len(group.rows), 'row')}</span>{marked}</summary>\n"
    yield drawings
    yield f"<details{_open(len(group.rows) <= _OPEN_ROWS_MAX)}><summary>Table of {counted(len(group.rows), 'row')}</summary>\n"
    yield f"<div class=scroll><table class=grid>\n<thead><tr>{_COLUMNS}</tr></thead>\n<tbody>\n"
    for operation in group.operations:
        for label, line in lines(group.of(operation)).items():
            for row in line:
                yield _row(group, operation, label, row)
    yield "</tbody>\n</table></div>\n"
    if any(not row.estimated and row.request_count < FEW for row in group.rows):
        yield f"<p class=soft>* The p99 of fewer than {FEW} requests is the slowest of them.</p>\n"
    yield "</details>\n</details>\n"


def _row(group: Group, operation: Operation, label: str, row: Row) -> str:
    summary = Summary.of(row.seconds)
    case = row.case
    about = [f"ack {case.ack}"] if case.ack and case.ack not in label else []
    about += [] if row.estimated else [counted(row.request_count, "request")]
    stages = ", ".join(f"{name.replace('_', ' ')} {shown(seconds * 1e3)}" for name, seconds in stages_of(row).items())
    size = f"{case.block_count:,} × {size_of(case.block_bytes)}" + ("" if case.block_count == 1 else f" = {size_of(case.payload_bytes)}")
    star = "*" if row.request_count < FEW else ""
    times = [shown(summary.median * 1e3), *([""] * 2 if row.estimated else [shown(summary.p95 * 1e3), shown(summary.p99 * 1e3) + star])]
    sooner = speedup(row, estimates_of(group.rows))
    ranks = f"<small>{case.rank_count} of {case.tensor_parallel} ranks restored</small>" if case.rank_count < case.tensor_parallel else ""
    last = [
        shown(row.gb_per_s) if row.gb_per_s else "",
        ("" if row.ceiling_gb_per_s is None else shown(row.ceiling_gb_per_s)) + (f"<small>{escape(row.ceiling)}</small>" if row.ceiling else ""),
        "" if row.ratio is None else ratio_told(row.ratio),
        "" if row.estimated else shown(row.cpu_s_per_gb),
        "" if row.memory_bytes_per_byte is None else f"{row.memory_bytes_per_byte:.2f}",
        "" if sooner is None else f"{shown(sooner)} ×{ranks}",
    ]
    return (
        f"<tr><td>{escape(f'{operation} by {label}')}<small>{escape(', '.join(about))}</small>{f'<small>ms: {escape(stages)}</small>' if stages else ''}</td>"
        f"<td class=number>{case.tokens:,}<small>{escape(size)}</small></td><td class=number>{case.queue_depth}</td>"
        f"<td{'' if row.is_as_asked else ' class=astray'}>{escape(way_told(row))}</td>"
        f"{''.join(f'<td class=number>{text}</td>' for text in (*times, *last))}</tr>\n"
    )


def _skipped(rows: Sequence[Row]) -> Iterator[str]:
    """Grouped by reason: one missing driver explains hundreds of rows."""
    if not rows:
        return
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        reasons.setdefault(row.skipped, []).append(row)
    yield f"<h3>{counted(len(rows), 'row')} not run on this machine, by reason</h3>\n"
    for reason, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
        kinds: dict[tuple[str, str], dict[int, list[int]]] = {}
        for row in found:
            kind = kinds.setdefault((title_of(row.case), f"{row.case.operation} by {row.case.path}"), {})
            kind.setdefault(row.case.tokens, []).append(row.case.queue_depth)
        counts = Counter(f"{row.case.operation} by {row.case.path}" for row in found)
        summed = ", ".join(f"{number:,} {asked}" for asked, number in counts.items())
        yield f"<p><b>{escape(reason)}</b></p>\n<details{_open(len(kinds) <= _OPEN_ROWS_MAX)}><summary>"
        yield f"{counted(len(found), 'row')}: {escape(summed)}</summary>\n<ul>\n"
        for (title, asked), sizes in kinds.items():
            yield f"<li>{escape(title)}, {escape(asked)}: {escape('; '.join(_told_size(tokens, depths) for tokens, depths in sorted(sizes.items())))}</li>\n"
        yield "</ul></details>\n"


def _told_size(tokens: int, depths: list[int]) -> str:
    told = ", ".join(str(depth) for depth in sorted(set(depths)))
    return f"{tokens:,} tokens" + ("" if set(depths) == {1} else f" at depth {told}")


def _open(is_open: bool) -> str:
    return " open" if is_open else ""
