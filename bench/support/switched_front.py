"""`offloadd serve` whose lanes change between the scheduler's order and that of arrival, by SIGUSR2 (arrival) and SIGUSR1 (back). Usage: FILE.

No configuration can do this: the order of arrival is what the scheduler is compared with. The counter FIFO tells which order it is.
"""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from bench.support.fifo_queue import SwitchedQueue
from offloadd.config import load_config
from offloadd.daemon.app import Daemon, raise_file_limit, settings_of
from offloadd.daemon.logs import configure

#: Among the daemon's counters.
FIFO = "bench_fifo"


async def serve(path: Path) -> None:
    """Serve until SIGTERM."""
    config = load_config(path)
    configure(config.daemon.log_level, config.daemon.log_format)
    daemon = Daemon(config, replace(settings_of(config), lane_queue=SwitchedQueue))

    def switch(fifo: bool) -> None:
        SwitchedQueue.fifo = fifo
        daemon.offload.core.counters[FIFO] = int(fifo)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.stopping.set)
    loop.add_signal_handler(signal.SIGUSR1, switch, False)
    loop.add_signal_handler(signal.SIGUSR2, switch, True)
    await daemon.start()
    await daemon.stopping.wait()
    await daemon.stop()


if __name__ == "__main__":
    raise_file_limit()
    asyncio.run(serve(Path(sys.argv[1])))
