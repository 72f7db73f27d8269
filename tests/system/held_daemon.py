"""`offloadd serve` whose host's mover is `held_mover`, and which tells among its counters what it holds for engines. Usage: FILE."""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from offloadd.config import load_config
from offloadd.daemon.app import Daemon, settings_of
from offloadd.daemon.logs import configure
from offloadd.offload import processes

#: Before the names of what is held, among the counters.
PREFIX = "held "


class TellingDaemon(Daemon):
    """Pins, reserved slots, requests and moves that are not over, regions and their descriptors."""

    def _counters(self) -> list[tuple[str, int]]:
        core = self.offload.core
        pools = [pool for pool in (core.catalog.arena, *core.catalog.volumes) if pool is not None]
        held = {
            "sessions": len(self.offload.sessions),
            "memory descriptors": self.offload.sessions._memory_file_count,
            "regions": len(core.regions),
            "mappings": len(core.host.mover._mappings),
            "requests": len(core.active),
            "keys under way": len(core.in_flight),
            "moves under way": len(core._unfinished),
            "jobs": sum(len(lane._sent) + len(lane._parts) for lane in core.lanes()),
            "pins": int(core.catalog._pins.sum()),
            "reserved slots": sum(pool.reserved_count for pool in pools),
            "fences": len(core.host.mover._fenced),
            "kept or leased": core.catalog.holds.held_count,
        }
        return [*super()._counters(), *((PREFIX + name, count) for name, count in held.items())]


# A mover that a test kills again and again is not one that keeps dying.
processes.RESTART_PAUSE_MAX_S = processes.RESTART_PAUSE_S


async def serve(path: Path) -> None:
    config = load_config(path)
    configure(config.daemon.log_level, config.daemon.log_format)
    daemon = TellingDaemon(config, replace(settings_of(config), mover_module="tests.system.held_mover"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stopping.set)
    await daemon.start()
    await daemon.stopping.wait()
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
