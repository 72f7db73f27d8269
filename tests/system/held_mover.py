"""The host's mover, in which a test holds a read, a write, a gather or a scatter for as long as it likes.

A file `read-0` in the folder OFFLOADD_TEST_HOLDS holds one read: the first that comes takes it, by making it `read-0.held`, and goes on when that is gone.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offloadd.mover import handover, main, slot_io

FOLDER = Path(os.environ["OFFLOADD_TEST_HOLDS"])


def _take(point: str) -> Path | None:
    for path in FOLDER.glob(f"{point}-*"):
        if not path.suffix:
            try:
                return path.rename(path.with_suffix(".held"))
            except FileNotFoundError:
                # Another thread was faster.
                continue
    return None


def _held(point: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        held = _take(point)
        while held is not None and held.exists():
            time.sleep(0.001)
        return real(*arguments, **options)

    return call


slot_io.read = _held("read", slot_io.read)
slot_io.write = _held("write", slot_io.write)
handover.gather_blocks = _held("gather", handover.gather_blocks)
handover.scatter_blocks = _held("scatter", handover.scatter_blocks)

if __name__ == "__main__":
    main.main()
