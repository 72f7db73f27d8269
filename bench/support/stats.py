"""Percentiles of repeated measurements."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

#: Of fewer values a p99 is their maximum.
FEW = 100


@dataclass(frozen=True, slots=True)
class Summary:
    """What is told of a series: same unit as its values. `p99` of fewer than FEW values is their maximum."""

    count: int
    median: float
    p25: float
    p75: float
    p95: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Summarize at least one value."""
        ordered = sorted(values)
        return cls(
            len(ordered),
            statistics.median(ordered),
            percentile(ordered, 25),
            percentile(ordered, 75),
            percentile(ordered, 95),
            percentile(ordered, 99),
            ordered[-1],
        )

    def detail(self, scale: float = 1.0, prefix: str = "") -> dict[str, float | int | str]:
        """For a figure's `detail`; values times `scale`."""
        return {
            f"{prefix}count": self.count,
            f"{prefix}median": self.median * scale,
            f"{prefix}p25": self.p25 * scale,
            f"{prefix}p75": self.p75 * scale,
            f"{prefix}p95": self.p95 * scale,
            f"{prefix}p99": self.p99 * scale,
            f"{prefix}max": self.maximum * scale,
        }


def percentile(ordered: list[float], percent: float) -> float:
    """The smallest value that is not below `percent` of the ascending values."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Paired:
    """The ratio of two series that were measured in turn: the median over pairs, so that what drifts between them cancels.

    `spread`: half of p75 - p25 of the pairs' ratios, by their median. Not that of either series: requests that queue differ by half, their rate hardly.
    """

    ratio: float
    spread: float

    @classmethod
    def of(cls, numerators: Iterable[float], denominators: Iterable[float]) -> "Paired":
        """At least one pair."""
        found = Summary.of(one / other for one, other in zip(numerators, denominators, strict=True))
        return cls(found.median, (found.p75 - found.p25) / 2 / found.median)

    @property
    def detail(self) -> dict[str, float | int | str]:
        """For a figure's `detail`: within what a comparison of two runs takes the ratio for the same."""
        return {"ratio_spread": self.spread}
