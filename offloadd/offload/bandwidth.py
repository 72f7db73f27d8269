"""What restores and evicts really achieved lately: by tier and path for estimates, and by route for the choice that AUTO takes. No I/O and no clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from offloadd.model.enums import Path, Tier
from offloadd.offload.moves import PathUse

#: Weight of the newest request.
WEIGHT = 0.2
#: Smaller requests measure latency, not bandwidth.
SAMPLE_BYTES_MIN = 4 << 20

#: Weight of a request that was alone on its route. With MARGIN it holds that one outlier does not turn the choice between two routes that are as fast.
REQUEST_WEIGHT = 0.1
#: Weight of a measurement of our own: they are few, and made to notice what has changed.
MEASUREMENT_WEIGHT = 0.5
#: The other route must be so many times as fast before the choice turns: it costs nothing to stay, and each turn would be an event for operators.
MARGIN = 1.2
#: Requests of so many payload bytes on one volume count as large: several blocks on several threads.
LARGE_BYTES = 2 << 20

#: Of routes of which nothing tells which is faster, the earlier one is taken.
_ORDER = (Path.HOST, Path.BOUNCE, Path.GDS)


class Direction(Enum):
    """Which route bytes go. The value is the name of the operation."""

    EVICT = "evict"
    RESTORE = "restore"


class SizeClass(IntEnum):
    """Small requests show what a route costs by the call, large ones what by the byte."""

    SMALL = 0
    LARGE = 1

    @classmethod
    def of(cls, payload_bytes: int) -> "SizeClass":
        """The class of a request that moves so much on one volume."""
        return cls.LARGE if payload_bytes >= LARGE_BYTES else cls.SMALL


@dataclass(frozen=True, slots=True)
class Route:
    """A path between a device and a volume, by its ordinal."""

    device: str
    volume: int
    path: Path


@dataclass(frozen=True, slots=True)
class Choice:
    """What AUTO takes between a device and a volume. `path` is AUTO where nothing is served; `rates`: bytes per second of the routes compared, 0 unknown."""

    device: str
    volume: int
    direction: Direction
    size: SizeClass
    path: Path
    before: Path
    rates: tuple[tuple[Path, float], ...]


@dataclass(slots=True)
class _Current:
    path: Path
    #: Whether it won a comparison. What was only the default has no right to stay.
    compared: bool


class Bandwidths:
    """Smoothed bytes per second, and the choices that follow from them. `on_change` hears each choice that turns."""

    def __init__(self, on_change: Callable[[Choice], None] = lambda _: None) -> None:
        self._by_request: dict[tuple[str, Tier, Path], float] = {}
        self._by_route: dict[tuple[Route, Direction, SizeClass], float] = {}
        #: Ways that are served; those that failed at their last measurement, with the reason, are taken only where there is no other.
        self._served: dict[tuple[str, int], list[Path]] = {}
        self._failures: dict[Route, str] = {}
        self._current: dict[tuple[str, int, Direction, SizeClass], _Current] = {}
        self._on_change = on_change

    # -- whole requests --------------------------------------------------------------------------------------------------------------

    def request(self, operation: str, tier: Tier, path: Path, payload_bytes: int, seconds: float) -> None:
        """A request moved so much in so long. See `answered`."""
        if payload_bytes < SAMPLE_BYTES_MIN or seconds <= 0:
            return
        key = (operation, tier, path)
        self._by_request[key] = _smoothed(self._by_request.get(key), payload_bytes / seconds, WEIGHT)

    def answered(self, operation: str, uses: Sequence[PathUse], seconds: float) -> None:
        """A request was answered. What went more than one way, or is not known to have gone any yet, tells nothing."""
        if len(uses) == 1 and uses[0].path != Path.AUTO:
            self.request(operation, uses[0].tier, uses[0].path, uses[0].payload_bytes, seconds)

    def rate(self, operation: str, tier: Tier, path: Path) -> float:
        """Bytes per second of whole requests, 0 while nothing was measured."""
        return self._by_request.get((operation, tier, path), 0.0)

    # -- routes ------------------------------------------------------------------------------------------------------------------------

    def serve(self, route: Route) -> None:
        """The route is served (again): what was measured of it before, or failed, says nothing any more."""
        paths = self._served.setdefault((route.device, route.volume), [])
        if route.path not in paths:
            paths.append(route.path)
            paths.sort(key=_ORDER.index)
        self._failures.pop(route, None)
        self._forget(route)
        self._decide_all(route)

    def withdraw(self, route: Route) -> None:
        """The route is not served any more."""
        paths = self._served.get((route.device, route.volume), [])
        if route.path in paths:
            paths.remove(route.path)
        self._failures.pop(route, None)
        self._forget(route)
        self._decide_all(route)

    def measured(self, route: Route, direction: Direction, payload_bytes: int, seconds: float, weight: float) -> None:
        """So much moved in so long with nothing else on the device and the volume, and all of it really by this path."""
        self.measured_together([(route, direction, payload_bytes, seconds)], weight)

    def measured_together(self, measurements: Iterable[tuple[Route, Direction, int, float]], weight: float) -> None:
        """As `measured`, for several that are to be compared: the choice follows from all of them."""
        routes = {}
        for route, direction, payload_bytes, seconds in measurements:
            if payload_bytes <= 0 or seconds <= 0:
                continue
            key = (route, direction, SizeClass.of(payload_bytes))
            self._by_route[key] = _smoothed(self._by_route.get(key), payload_bytes / seconds, weight)
            self._failures.pop(route, None)
            routes[route.device, route.volume] = route
        for route in routes.values():
            self._decide_all(route)

    def failed(self, route: Route, why: str) -> None:
        """Bytes did not come through, or not by this path: another route is taken until it was measured again."""
        self._failures[route] = why
        self._forget(route)
        self._decide_all(route)

    def choice(self, device: str, volume: int, direction: Direction, payload_bytes: int) -> Path:
        """The path that a request of so many bytes on this volume takes if it may choose; AUTO where none is served."""
        return self.choice_of(device, volume, direction, SizeClass.of(payload_bytes))

    def choice_of(self, device: str, volume: int, direction: Direction, size: SizeClass) -> Path:
        """As `choice`, by the size class."""
        current = self._current.get((device, volume, direction, size))
        return current.path if current is not None else Path.AUTO

    def rate_of(self, route: Route, direction: Direction, size: SizeClass) -> float:
        """Bytes per second of a route, 0 while nothing was measured."""
        return self._by_route.get((route, direction, size), 0.0)

    def failure(self, route: Route) -> str:
        """Why the route failed at its last measurement; empty if it did not."""
        return self._failures.get(route, "")

    def _forget(self, route: Route) -> None:
        for direction in Direction:
            for size in SizeClass:
                self._by_route.pop((route, direction, size), None)

    def _decide_all(self, route: Route) -> None:
        for direction in Direction:
            for size in SizeClass:
                self._decide(route.device, route.volume, direction, size)

    def _decide(self, device: str, volume: int, direction: Direction, size: SizeClass) -> None:
        served = self._served.get((device, volume), [])
        usable = [path for path in served if Route(device, volume, path) not in self._failures] or served
        key = (device, volume, direction, size)
        before = self._current.get(key)
        rates = self._rates(device, volume, direction, size, usable)
        if len(usable) < 2 or not rates:
            path, compared = (usable[0] if usable else Path.AUTO), False
        else:
            path, compared = max(usable, key=lambda one: rates[one]), True
            if before is not None and before.compared and before.path in rates and rates[path] <= MARGIN * rates[before.path]:
                path = before.path
        self._current[key] = _Current(path, compared)
        if before is not None and before.path != path:
            told = tuple((one, self.rate_of(Route(device, volume, one), direction, size)) for one in served)
            self._on_change(Choice(device, volume, direction, size, path, before.path, told))

    def _rates(self, device: str, volume: int, direction: Direction, size: SizeClass, paths: list[Path]) -> dict[Path, float]:
        """Of all of the paths, in this size class or, where that was not measured, in the other one; empty if some were in neither."""
        for one in (size, *(other for other in SizeClass if other != size)):
            rates = {path: self.rate_of(Route(device, volume, path), direction, one) for path in paths}
            if all(rates.values()):
                return rates
        return {}


def _smoothed(known: float | None, rate: float, weight: float) -> float:
    return rate if known is None else known + weight * (rate - known)
