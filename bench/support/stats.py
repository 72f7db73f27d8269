"""Percentiles of repeated measurements."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """What is told of a series: same unit as its values. `p99` of fewer than 100 values is their maximum."""

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


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Median of the ratios of pairs that were measured one after the other: what drifts between pairs cancels."""
    return statistics.median(one / other for one, other in zip(numerators, denominators, strict=True))
