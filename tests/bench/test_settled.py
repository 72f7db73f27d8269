"""A benchmark begins when the daemon has opened its lanes and has measured them: its own moves would make ceilings look low."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.support.settled import settled_paths
from offloadd.client import Path, PathCapability, Tier, VolumeRates


def route(volume: str, *, available: bool = True, note: str = "") -> VolumeRates:
    return VolumeRates(volume, available, note, 0, 0, 0, 0, False, False, False, False)


def way(path: Path, *volumes: VolumeRates, available: bool = True, note: str = "", device: str = "cuda:0") -> PathCapability:
    return PathCapability(Tier.VOLUME, path, device, available, note, 0, 0, volumes)


class Opening:
    """A daemon that opens and measures between two looks at it."""

    def __init__(self, *looks: list[PathCapability]) -> None:
        self.looks = list(looks)

    def capabilities(self) -> SimpleNamespace:
        return SimpleNamespace(paths=tuple(self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]))


def settled(*looks: list[PathCapability], device: str = "cuda:0") -> list[PathCapability]:
    return settled_paths(Opening(*looks), [device])  # type: ignore[arg-type]


def test_lanes_that_are_still_opened_are_waited_for() -> None:
    other = way(Path.GDS, available=False, device="cuda:1")
    looks = [
        [way(Path.GDS, available=False, note="its mover is starting"), way(Path.BOUNCE, available=False, note="its mover is starting"), other],
        [way(Path.GDS, available=False), way(Path.BOUNCE), other],
        [way(Path.GDS), way(Path.BOUNCE), other],
    ]
    assert settled(*looks) == looks[2][:2]
    refused = [way(Path.GDS, available=False, note="no nvidia-fs")]
    assert settled(refused) == refused


def test_a_daemon_without_a_volume_is_not_waited_for() -> None:
    none = [way(path, available=False, note="no volume is serving") for path in (Path.BOUNCE, Path.GDS)]
    assert settled(none, [way(Path.GDS)]) == none


def test_measurements_of_the_daemons_own_are_waited_for() -> None:
    def look(note: str, other: str = "") -> list[PathCapability]:
        return [way(path, route("a", note=note), route("b", note=other)) for path in (Path.BOUNCE, Path.GDS)]

    over = look("", "gds, measured: evict of 1 blocks gave IO_ERROR")
    assert settled(look("not measured yet", "not measured yet"), look("", "not measured yet: something else always moved"), over) == over


def test_a_route_that_is_compared_with_none_is_never_measured_and_not_waited_for() -> None:
    bounced = [
        way(Path.BOUNCE, route("a", note="not measured yet")),
        way(Path.GDS, route("a", available=False, note="no nvidia-fs"), available=False, note="no nvidia-fs"),
    ]
    assert settled(bounced) == bounced


def test_what_does_not_settle_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.support.settled.SETTLE_TIMEOUT_S", 0.0)
    never = way(Path.GDS, available=False)
    assert settled([never]) == [replace(never, note="it was not opened within 0 s")]
    with pytest.raises(RuntimeError, match=r"still measures paths after 0 s.*cuda:0, a: not measured yet"):
        settled([way(path, route("a", note="not measured yet")) for path in (Path.BOUNCE, Path.GDS)])
