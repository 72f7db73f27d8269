"""The mover, whose main thread waits for ever in the first message that comes while the file OFFLOADD_TEST_STUCK is there; and the daemon with it, when run
with `offloadd`'s own arguments."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

STUCK = "OFFLOADD_TEST_STUCK"
COMMAND = ("-m", "tests.system.mover_that_sticks", "serve", "--config")


def run_mover() -> None:
    from offloadd.mover import main

    real = main.Mover._handle

    def handle(self: Any, message: Any, fds: list[int]) -> None:
        if Path(os.environ[STUCK]).exists():
            threading.Event().wait()
        real(self, message, fds)

    main.Mover._handle = handle  # type: ignore[method-assign]
    main.main()


def run_daemon() -> None:
    from offloadd.cli.main import run
    from offloadd.offload import service

    real = service.MoverLink
    service.MoverLink = lambda **options: real(**{**options, "module": __spec__.name})  # type: ignore[misc, assignment]
    run()


if __name__ == "__main__":
    if "--fd" in sys.argv:
        run_mover()
    else:
        run_daemon()
