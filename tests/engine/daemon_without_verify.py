"""`offloadd serve` with verification switched off, which no configuration can do: shows what verification protects from. Usage: FILE."""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from offloadd.config import load_config
from offloadd.daemon.app import Daemon, settings_of
from offloadd.daemon.logs import configure


async def serve(path: Path) -> None:
    config = load_config(path)
    configure(config.daemon.log_level, config.daemon.log_format)
    daemon = Daemon(config, replace(settings_of(config), verify=False))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stopping.set)
    await daemon.start()
    await daemon.stopping.wait()
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
