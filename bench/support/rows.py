"""Rows of a grid: one case each (a model's blocks, an operation, a path, a depth), measured or with the reason why this machine can't run it."""

import enum
from collections.abc import Iterable, Mapping

import msgspec

from bench.support.figure import Figure
from bench.support.stats import Summary

#: Quantiles of a series that a row keeps: enough to draw its distribution, and no more than a page can hold.
QUANTILES_MAX = 201


#: The ways that are the one asked for. By cuFile's own counts `gds` is one of two; every other path has one way of its own name.
_WAYS_OF = {"gds": frozenset({"gds_nvfs", "gds_p2p"})}


#: Model, ranks, dtype, tokens.
Prompt = tuple[str, int, str, int]


class Operation(enum.StrEnum):
    """Which way blocks go, as seen from the engine."""

    EVICT = "evict"
    RESTORE = "restore"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured. Bytes are those of one rank; `block_count` blocks of `block_bytes` hold `tokens` tokens, the last one perhaps in part.

    `path`: the way asked for (gds, bounce, ddr, host, recompute). `ack`: of an evict (copied, durable). `queue_depth`: requests in flight at once, each of
    `block_count` blocks. `background`: what runs beside it; empty for nothing.
    """

    model: str
    tensor_parallel: int
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    tokens: int
    block_count: int
    operation: Operation
    path: str
    ack: str = ""
    queue_depth: int = 1
    gpu_count: int = 0
    volume_count: int = 1
    background: str = ""

    @property
    def payload_bytes(self) -> int:
        """Of one request."""
        return self.block_bytes * self.block_count

    @property
    def rank_count(self) -> int:
        """Ranks whose blocks move: an engine on the host is one, and each GPU is one. A recompute keeps all ranks' GPUs busy, however few move here."""
        return min(self.tensor_parallel, max(1, self.gpu_count))

    @property
    def prompt(self) -> "Prompt":
        """What a recompute of it depends on."""
        return self.model, self.tensor_parallel, self.kv_dtype, self.tokens

    @property
    def name(self) -> str:
        """The same in every run, and different for every case."""
        words = [
            f"{self.model} TP{self.tensor_parallel} {self.kv_dtype}",
            f"{self.tokens:,} tokens ({self.block_count} × {self.block_bytes / 1024:g} KiB)",
            f"{self.operation} by {self.path}" + (f", {self.ack}" if self.ack else ""),
            f"depth {self.queue_depth}",
        ]
        # A host's engine and a GPU's both have a path `ddr`: the GPU in the name keeps them apart.
        if self.gpu_count or self.volume_count > 1:
            words.append(f"{counted(self.gpu_count, 'GPU')}, {counted(self.volume_count, 'volume')}")
        if self.background:
            words.append(f"beside {self.background}")
        return ", ".join(words)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A case and what came of it.

    `skipped`: why it was not run; then all else is empty. `proven`: the ways that bytes really went, as the daemon's answers said, each with its share of the
    payload. `seconds`: latencies of single requests, ascending, at most QUANTILES_MAX evenly spaced quantiles of them. `gb_per_s`: payload of all requests
    over the time of all, so that depth counts. `memory_bytes_per_byte`: host memory traffic a payload byte, None where nothing counts it (`memory_note` says
    why). `stages`: seconds of a request by stage, medians. `ceiling`: the name of what bounds it on this machine, measured in the same run, and its rate;
    without a rate the reason why there is none.
    """

    case: Case
    skipped: str = ""
    proven: dict[str, float] = {}
    request_count: int = 0
    seconds: list[float] = []
    gb_per_s: float = 0.0
    cpu_s_per_gb: float = 0.0
    memory_bytes_per_byte: float | None = None
    memory_note: str = ""
    stages: dict[str, float] = {}
    ceiling: str = ""
    ceiling_gb_per_s: float | None = None
    #: Of rates to the ceiling, in pairs measured one after the other.
    ratio: float | None = None
    #: Half of p75 - p25 of these pairs' ratios, by their median: what the ratio varies by itself.
    ratio_spread: float | None = None
    #: Whether the seconds were worked out from a model of the hardware instead of being measured (recompute).
    estimated: bool = False

    @property
    def asked_share(self) -> float:
        """The share of the payload that is proven to have gone the way asked for."""
        return sum(share for way, share in self.proven.items() if way in self._ways_asked)

    @property
    def is_as_asked(self) -> bool:
        """Whether all of the payload is proven to have gone the way asked for. What was never moved went no other way."""
        return bool(self.skipped) or self.estimated or (bool(self.proven) and self.proven.keys() <= self._ways_asked)

    @property
    def _ways_asked(self) -> frozenset[str]:
        return _WAYS_OF.get(self.case.path, frozenset({self.case.path}))

    @property
    def figure(self) -> Figure:
        """The row as a figure, for the table and for comparisons. Only of a row that was run."""
        summary = Summary.of(self.seconds)
        return Figure(
            name=self.case.name,
            value=summary.median * 1e3,
            unit="ms",
            ceiling=None,
            ratio=self.ratio,
            detail={
                "way": " + ".join(f"{way} {share:.0%}" for way, share in sorted(self.proven.items())) or ("estimated" if self.estimated else "unproven"),
                **summary.detail(1e3),
                "gb_per_s": self.gb_per_s,
                "cpu_s_per_gb": self.cpu_s_per_gb,
                **({} if self.ratio_spread is None else {"ratio_spread": self.ratio_spread}),
            },
        )


def estimates_of(rows: Iterable[Row]) -> dict[Prompt, float]:
    """Seconds of the estimated recomputes."""
    return {row.case.prompt: row.seconds[0] for row in rows if row.estimated and not row.skipped}


def speedup(row: Row, estimates: Mapping[Prompt, float]) -> float | None:
    """How many times as long the recompute of as many tokens would take as this restore, by its median; None for what is no measured restore, or without an
    estimate. Where `Case.rank_count` is below the model's ranks the others' restores, which would run beside it, are not in it."""
    estimate = estimates.get(row.case.prompt)
    if row.estimated or row.case.operation is not Operation.RESTORE or estimate is None:
        return None
    return estimate / Summary.of(row.seconds).median


def counted(count: int, noun: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def quantiles_of(seconds: list[float]) -> list[float]:
    """What a row keeps of a series: all of it, ascending, or evenly spaced quantiles with the least and the greatest."""
    ordered = sorted(seconds)
    if len(ordered) <= QUANTILES_MAX:
        return ordered
    return [ordered[round(number * (len(ordered) - 1) / (QUANTILES_MAX - 1))] for number in range(QUANTILES_MAX)]
