"""Which ways a daemon has: once each is opened or refused, and once it has measured those that it compares, whose moves would run beside ceilings."""

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from offloadd.client import Client, PathCapability
from offloadd.offload.measure import NOT_YET

#: A mover of a GPU loads CUDA and compiles kernels, cuFile's driver has half a minute of its own, and a round of measurements takes seconds.
SETTLE_TIMEOUT_S = 120.0
#: Notes of ways that are not there yet, rather than refused.
_PASSING = ("", "its mover is starting")


def settled_paths(client: Client, devices: Collection[str]) -> list[PathCapability]:
    """The ways of these devices of a daemon whose volumes serve; those that are neither there nor refused after SETTLE_TIMEOUT_S say so.

    Raises RuntimeError if it still measures then.
    """
    end = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        ways = [way for way in client.capabilities().paths if way.device in devices]
        opening = [way for way in ways if not way.available and way.note in _PASSING]
        measuring = [] if opening else list(_measured_still(ways))
        if not opening and not measuring:
            return ways
        if time.monotonic() > end:
            if measuring:
                raise RuntimeError(f"the daemon still measures paths after {SETTLE_TIMEOUT_S:g} s, which would disturb what is measured here: {measuring[0]}")
            return [replace(way, note=way.note or f"it was not opened within {SETTLE_TIMEOUT_S:g} s") if way in opening else way for way in ways]
        time.sleep(0.05)


def _measured_still(ways: Iterable[PathCapability]) -> Iterator[str]:
    """Routes that the daemon is still to measure: where it has two to choose from."""
    routes: dict[tuple[str, str], list[str]] = {}
    for way in ways:
        for one in way.volumes:
            if one.available:
                routes.setdefault((way.device, one.volume), []).append(one.note)
    for (device, volume), notes in routes.items():
        yield from (f"{device}, {volume}: {note}" for note in notes if len(notes) > 1 and note.startswith(NOT_YET))
