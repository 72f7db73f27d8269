"""What must hold of a row that was read from a file, so that pages and comparisons need not ask again."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.support.rows import QUANTILES_MAX, Case, Row

#: Shares were rounded by whoever wrote them.
_SHARES_OFF_MAX = 1e-3


def rows_of(values: list[dict[str, Any]]) -> list[Row]:
    """The rows as stored, each checked. Raises ValueError that names the row, from 1 on, and says what is wrong with it."""
    return [_row_of(number, value) for number, value in enumerate(values, start=1)]


def _row_of(number: int, value: dict[str, Any]) -> Row:
    try:
        row = msgspec.convert(value, Row)
    except msgspec.ValidationError as error:
        raise ValueError(f"row {number}: {error}") from error
    for wrong in _wrong(row):
        raise ValueError(f"row {number} ({row.case.name}): {wrong}")
    return row


def _wrong(row: Row) -> Iterator[str]:
    yield from _wrong_case(row.case)
    if row.skipped:
        yield from _wrong_skipped(row)
        return
    yield from _wrong_seconds(row)
    yield from _wrong_numbers(row)
    yield from _wrong_ways(row)
    yield from _wrong_ceiling(row)


def _wrong_case(case: Case) -> Iterator[str]:
    for name in ("model", "kv_dtype", "path"):
        if not getattr(case, name):
            yield f"{name} is empty"
    for name, least in (("tensor_parallel", 1), ("block_tokens", 1), ("block_bytes", 1), ("tokens", 1), ("block_count", 1), ("queue_depth", 1)):
        if getattr(case, name) < least:
            yield f"{name} is {getattr(case, name)}, at least {least} is needed"
    for name in ("gpu_count", "volume_count"):
        if getattr(case, name) < 0:
            yield f"{name} is {getattr(case, name)}, less than 0"
    if not (case.block_count - 1) * case.block_tokens < case.tokens <= case.block_count * case.block_tokens:
        yield f"{case.tokens} tokens don't fill {case.block_count} blocks of {case.block_tokens} tokens, the last one perhaps in part"


def _wrong_skipped(row: Row) -> Iterator[str]:
    for field in msgspec.structs.fields(Row):
        if field.name in ("case", "skipped"):
            continue
        empty = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if getattr(row, field.name) != empty:
            yield f"it was skipped ({row.skipped}) and yet has {field.name} = {getattr(row, field.name)!r}"


def _wrong_seconds(row: Row) -> Iterator[str]:
    if not row.seconds:
        yield "it was not skipped and has no seconds"
    if len(row.seconds) > QUANTILES_MAX:
        yield f"{len(row.seconds)} seconds, more than {QUANTILES_MAX}"
    for value in row.seconds:
        if not 0 < value < math.inf:
            yield f"seconds hold {value}, not a finite number above 0"
    for first, second in zip(row.seconds, row.seconds[1:], strict=False):
        if second < first:
            yield f"seconds don't ascend: {second} after {first}"
    if not row.estimated and row.request_count < len(row.seconds):
        yield f"request_count is {row.request_count}, and there are {len(row.seconds)} seconds"


def _wrong_numbers(row: Row) -> Iterator[str]:
    """JSON as Python writes it may hold NaN and Infinity, which no plot and no comparison sees as wrong."""
    numbers = [("gb_per_s", row.gb_per_s), ("cpu_s_per_gb", row.cpu_s_per_gb), ("memory_bytes_per_byte", row.memory_bytes_per_byte)]
    numbers.append(("ratio_spread", row.ratio_spread))
    for name, value in (*numbers, *((f"stage {stage}", value) for stage, value in row.stages.items())):
        if value is not None and not 0 <= value < math.inf:
            yield f"{name} is {value}, not a finite number from 0 up"
    if not row.estimated and not row.gb_per_s:
        yield "gb_per_s is 0 of a row that was measured"


def _wrong_ways(row: Row) -> Iterator[str]:
    if row.estimated and row.proven:
        yield f"it is estimated and yet proven to have gone {', '.join(row.proven)}"
    for way, share in row.proven.items():
        if not 0 < share <= 1 + _SHARES_OFF_MAX:
            yield f"the share of {way} is {share}, not above 0 and at most 1"
    if row.proven and abs(sum(row.proven.values()) - 1) > _SHARES_OFF_MAX:
        yield f"the shares of its ways sum to {sum(row.proven.values()):g}, not to 1"


def _wrong_ceiling(row: Row) -> Iterator[str]:
    """A ceiling without a rate is the reason why there is none."""
    if row.ceiling_gb_per_s is not None and not row.ceiling:
        yield f"the ceiling of {row.ceiling_gb_per_s} GB/s has no name"
    if row.ratio is not None and row.ceiling_gb_per_s is None:
        yield f"the ratio {row.ratio} is to no ceiling"
    if row.ratio_spread is not None and row.ratio is None:
        yield f"the ratio_spread {row.ratio_spread} is of no ratio"
    for name, value in (("ceiling_gb_per_s", row.ceiling_gb_per_s), ("ratio", row.ratio)):
        if value is not None and not 0 < value < math.inf:
            yield f"{name} is {value}, not a finite number above 0"
