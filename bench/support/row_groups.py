"""Rows of a grid in the groups that a page shows: what can be drawn in one plot, and under which name each line stands."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.support.figure import shown
from bench.support.rows import Case, Operation, Row, counted
from offloadd.units import GIB, KIB, MIB

#: The order of paths in plots, legends and tables: from the GPU's to the estimate.
_PATHS = ("gds", "bounce", "ddr", "host", "recompute")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that were run of one model, tensor parallelism and data type, on as many GPUs and volumes, beside the same load."""

    title: str
    rows: list[Row]

    def of(self, operation: Operation) -> list[Row]:
        """The rows of one operation."""
        return [row for row in self.rows if row.case.operation is operation]

    @property
    def operations(self) -> list[Operation]:
        """Those that have rows, evict first."""
        return [operation for operation in Operation if self.of(operation)]

    @property
    def tokens(self) -> list[int]:
        """Every size that was run, ascending."""
        return sorted({row.case.tokens for row in self.rows})


def groups(rows: Iterable[Row]) -> list[Group]:
    """Groups in the order in which they first appear. An estimate, which knows no GPUs and volumes, joins each of its model's."""
    ran = [(_key(row.case), row) for row in rows if not row.skipped]
    keys = list(dict.fromkeys(key for key, row in ran if not row.estimated))
    models = {key[:3] for key in keys}
    keys += [(*model, 1, 1, "") for model in dict.fromkeys(key[:3] for key, _ in ran) if model not in models]
    found = []
    for key in keys:
        chosen = [row for own, row in ran if (own[:3] == key[:3] if row.estimated else own == key)]
        found.append(Group(_title(key), sorted(chosen, key=lambda row: rank(row.case))))
    return found


def title_of(case: Case) -> str:
    """Of the group that a row of this case is in, or would be."""
    return _title(_key(case))


_Key = tuple[str, int, str, int, int, str]


def _key(case: Case) -> _Key:
    """A host's engine has no GPU, and belongs beside the one with one GPU."""
    return case.model, case.tensor_parallel, case.kv_dtype, max(1, case.gpu_count), max(1, case.volume_count), case.background


def _title(key: _Key) -> str:
    model, tensor_parallel, kv_dtype, gpu_count, volume_count, background = key
    words = [f"{model}, TP {tensor_parallel}, {kv_dtype}"]
    if gpu_count > 1 or volume_count > 1:
        words.append(f"{counted(gpu_count, 'GPU')}, {counted(volume_count, 'volume')}")
    if background:
        words.append(f"beside {background}")
    return ", ".join(words)


def rank(case: Case) -> tuple[str, int, str, int, str, int, int, int]:
    """Sorts rows: by operation, path, what else the line is, and along the line."""
    place = _PATHS.index(case.path) if case.path in _PATHS else len(_PATHS)
    return case.operation, place, case.path, case.gpu_count, case.ack, case.block_tokens, case.tokens, case.queue_depth


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the label of their line: the path, and as much more as tells it from others of the same path."""
    found: dict[str, list[Row]] = {}
    kinds = {row.case.path: {_kind(one.case) for one in rows if one.case.path == row.case.path} for row in rows}
    for row in sorted(rows, key=lambda row: rank(row.case)):
        found.setdefault(_label(row.case, kinds[row.case.path]), []).append(row)
    return found


_Kind = tuple[str, str, str]


def _kind(case: Case) -> _Kind:
    return "of a GPU" if case.gpu_count else "of the host", case.ack, f"{case.block_tokens}-token blocks"


def _label(case: Case, kinds: set[_Kind]) -> str:
    kind = _kind(case)
    told = [word for place, word in enumerate(kind) if word and len({other[place] for other in kinds}) > 1]
    return ", ".join([case.path, *told])


def stages_of(row: Row) -> dict[str, float]:
    """Seconds by stage, names without their unit. The whole request's time, which the daemon tells beside its stages, is none of them."""
    return {name.removesuffix("_s"): seconds for name, seconds in row.stages.items() if name.removesuffix("_s") != "total"}


def commonest(values: Iterable[int]) -> int | None:
    """The value that occurs most often, the greatest of several; None of none."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value)) if counts else None


def least_depth(rows: Iterable[Row]) -> list[Row]:
    """Of each line and size the row with the fewest requests in flight: its latency is that of the move, not of a queue."""
    found: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.case.queue_depth):
        found.setdefault((row.case.operation, row.case.path, _kind(row.case), row.case.tokens), row)
    return list(found.values())


def size_of(size_bytes: float) -> str:
    """In the unit that leaves at most four digits before the point."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{shown(size_bytes / unit)} {name}"
    return f"{shown(size_bytes)} B"


def ratio_told(ratio: float) -> str:
    """Two decimals, more of a small one, which would be none."""
    return f"{ratio:.2f}" if ratio >= 0.1 else shown(ratio)
