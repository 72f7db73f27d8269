"""Looks after the movers: asks each whether it is there, and has those replaced that are wedged (`supervision`)."""

import asyncio
from collections.abc import Mapping

import structlog

from offloadd import clock
from offloadd.offload.devices import Device

#: How often it looks.
PERIOD_S = 0.25

log = structlog.get_logger()


class MoverWatch:
    """One for all movers. Event-loop owned."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            for device in self._devices.values():
                try:
                    self.look(device)
                except Exception:
                    # Of ours; without a look at it the next mover would be wedged unseen.
                    log.exception("bug: looking after a mover failed", device=device.name)
            await asyncio.sleep(PERIOD_S)

    def look(self, device: Device) -> None:
        """See how one mover does."""
        now_ns = clock.monotonic_ns()
        arena = device.arena_lane
        # Lanes to volumes do not count: what stands still there is the volume, as a rule.
        device.mover.look(now_ns, arena.stalled_ns(now_ns) if arena is not None else 0)
