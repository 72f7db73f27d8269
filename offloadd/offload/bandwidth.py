"""What restores and evicts really achieved lately, by tier and path: for estimates and for `GetCapabilities`."""

from offloadd.model.enums import Path, Tier

#: Weight of the newest measurement.
WEIGHT = 0.2
#: Smaller requests measure latency, not bandwidth.
SAMPLE_BYTES_MIN = 4 << 20


class Bandwidths:
    """Smoothed bytes per second. A request that took more than one way says nothing about either and is not counted."""

    def __init__(self) -> None:
        self._by_way: dict[tuple[str, Tier, Path], float] = {}

    def measured(self, operation: str, tier: Tier, path: Path, payload_bytes: int, seconds: float) -> None:
        """A request moved so much in so long."""
        if payload_bytes < SAMPLE_BYTES_MIN or seconds <= 0:
            return
        rate = payload_bytes / seconds
        known = self._by_way.get((operation, tier, path))
        self._by_way[operation, tier, path] = rate if known is None else known + WEIGHT * (rate - known)

    def rate(self, operation: str, tier: Tier, path: Path) -> float:
        """Bytes per second, 0 while nothing was measured."""
        return self._by_way.get((operation, tier, path), 0.0)
