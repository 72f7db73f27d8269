"""The whole daemon on a thread of this process, so that a benchmark may reach behind its API: fill its index, read without restoring."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from offloadd import clock
from offloadd.catalog.index import keys_array
from offloadd.config.schema import Config
from offloadd.daemon.app import Daemon
from offloadd.daemon.logs import configure
from offloadd.mover.messages import Job, Operation
from offloadd.offload.core import new_blocks
from offloadd.scheduler.job_class import JobClass
from offloadd.units import MIB

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0


def make_config(
    runtime_dir: Path, *, volumes: tuple[Path, ...] = (), arena_bytes: int = 0, index_bytes_max: int = 1 << 30, prewrite: bool = True, open_slabs: int = 8
) -> Config:
    """The defaults, quiet, with these tiers."""
    return Config.model_validate(
        {
            "daemon": {"runtime_dir": str(runtime_dir), "log_level": "warning", "metrics_listen": ""},
            "arena": {"arena_bytes": arena_bytes, "slab_bytes": 64 * MIB},
            "limits": {"index_bytes_max": index_bytes_max},
            "volume": [{"path": str(path), "prewrite": prewrite, "open_slabs": open_slabs} for path in volumes],
        }
    )


class DaemonThread:
    """A context manager: inside it the daemon serves. Its workers are processes, as always; this process is the front."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="front", daemon=True)
        self.daemon: Daemon

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = 600.0) -> Result:
        """Run a coroutine on the front's event loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the front's event loop and wait for it."""

        async def work() -> Result:
            return function()

        return self.run(work())

    def __enter__(self) -> "DaemonThread":
        configure("warning", "text")
        self._thread.start()

        async def start() -> Daemon:
            daemon = Daemon(self._config)
            await daemon.start()
            return daemon

        self.daemon = self.run(start(), START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.daemon.stop(), START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def worker_pids(self) -> list[int]:
        """The mover and the keepers."""
        core = self.daemon.offload.core
        return [core.host.mover.process.pid, *(volume.process.pid for volume in core.volumes)]

    def read_only(self, keys: list[bytes], *, slot_bytes: int) -> float:
        """Read blocks of the only volume into staging slots and no further, through the lane that restores use; seconds."""
        return self.run(self._read_only(keys, slot_bytes))

    async def _read_only(self, keys: list[bytes], slot_bytes: int) -> float:
        core = self.daemon.offload.core
        start = time.perf_counter()
        sources = core.catalog.plan_restore(keys_array(keys))
        count = len(keys)
        if not (sources.rows > 0).all() or not (sources.volume == 0).all():
            raise RuntimeError("not every block has its only copy on the volume")
        blocks = new_blocks(count)
        blocks["key"] = keys_array(keys)
        blocks["payload_bytes"] = sources.payload_bytes
        blocks["position"] = np.arange(count)
        core.fill_sources(blocks, 0, sources.slab, sources.slot, int(core.catalog.namespaces_of(sources.rows)[0]))
        lane = core.host.volume_lane(0)
        assert lane is not None
        move = core.new_move(count)
        order = Job(
            job=move.number,
            move=move.number,
            operation=Operation.READ_ONLY,
            slot_bytes=slot_bytes,
            blocks=b"",
            submitted_ns=clock.monotonic_ns(),
        )
        lane.submit(move, order, blocks, JobClass.INTERACTIVE)
        await move.finished.wait()
        core.catalog.unpin(sources.rows)
        core.host.mover.forget_move(move.number)
        if move.reasons.any():
            raise RuntimeError(f"{int((move.reasons != 0).sum())} of {count} blocks could not be read")
        return time.perf_counter() - start
