"""`offloadd serve` on a machine with the NUMA nodes 0 and 1, whose movers look at another root. Usage: FILE."""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from offloadd.config import load_config
from offloadd.daemon.app import Daemon, settings_of
from offloadd.daemon.logs import configure
from offloadd.units import GIB


async def serve(path: Path) -> None:
    config = load_config(path)
    configure(config.daemon.log_level, config.daemon.log_format)
    nodes = ((0, GIB), (1, GIB)) if config.mover.numa else ()
    daemon = Daemon(config, replace(settings_of(config), numa_nodes=nodes, mover_module="tests.gpu.mover_of_a_tree"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stopping.set)
    await daemon.start()
    await daemon.stopping.wait()
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
