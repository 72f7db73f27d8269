"""KvikIO without anything of ours around it: the ceiling of `gds`, in a process that does nothing else with cuFile, and what KvikIO does past cuFile."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from bench.support.ios import Io, over_threads
from bench.support.mover import STAGING_SLOT_BYTES
from offloadd.cuda.cufile_stats import PathCounts
from offloadd.cuda.device import Device
from offloadd.cuda.gds import StagingSlot
from offloadd.cuda.gds_setup import configure
from offloadd.cuda.memory import DeviceMemory
from offloadd.model.enums import Way

#: Of KvikIO's pool: an I/O holds one until it ends.
THREADS_MAX = 64


class BareKvikio:
    """KvikIO's `pread` and `pwrite` into memory of the GPU. One in a process.

    Compat mode is off, as in the mover: registered memory, and a machine without a way past the host has no such ceiling. `compat`: KvikIO's own bounce through
    host memory, with O_DIRECT, or reads would be of the page cache.
    """

    def __init__(self, device: Device, *, compat: bool = False) -> None:
        """Raises GdsUnavailable unless `compat`."""
        self._device = device
        self._held = contextlib.ExitStack()
        self._registered = not compat
        self._counts = self._in_compat_mode() if compat else self._past_the_host()
        #: One for each thread that was needed so far.
        self._slots: list[StagingSlot | DeviceMemory] = []

    def _past_the_host(self) -> Callable[[], PathCounts]:
        gds = configure(self._device, task_bytes=STAGING_SLOT_BYTES, threads=THREADS_MAX)
        self._held.callback(gds.close)
        return gds.proof.snapshot

    def _in_compat_mode(self) -> Callable[[], PathCounts]:
        import kvikio
        import kvikio.defaults

        kvikio.defaults.set(
            {
                "compat_mode": kvikio.CompatMode.ON,
                "gds_threshold": 0,
                "task_size": STAGING_SLOT_BYTES,
                "num_threads": THREADS_MAX,
                "bounce_buffer_size": STAGING_SLOT_BYTES,
                "auto_direct_io_read": True,
            }
        )
        monitor = kvikio.SummaryMonitor()
        return lambda: PathCounts(kvikio_posix=sum(totals["num_ops"] for name, totals in monitor.get().by_backend.items() if name != "GDS"))

    def run(self, paths: Sequence[str], ios: Sequence[Io], *, threads: int, writes: bool = False) -> tuple[float, dict[Way, int]]:
        """Seconds of these I/Os with so many threads, at most THREADS_MAX, and how many went which way by the counts of cuFile and KvikIO.

        Writes are synced before the clock stops. Raises GdsUnavailable or CudaError without room for a slot a thread, OSError, RuntimeError of KvikIO.
        """
        import kvikio

        self._device.make_current()
        while len(self._slots) < threads:
            slot = (StagingSlot if self._registered else DeviceMemory).allocate(self._device, STAGING_SLOT_BYTES)
            self._slots.append(slot)
            # cuFile forgets memory before it is freed: nvidia-fs can deadlock over what is gone.
            self._held.callback(slot.close)
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(contextlib.closing(kvikio.CuFile(path, "r+" if writes else "r"))) for path in paths]
            before = self._counts()
            seconds = over_threads(threads, ios, lambda thread, io: self._one(files[io.volume], self._slots[thread].address, io, writes))
            if writes:
                start = time.perf_counter()
                for path in paths:
                    _sync(path)
                seconds += time.perf_counter() - start
            done = self._counts() - before
        return seconds, {way: done.count(way) for way in Way if done.count(way)}

    def _one(self, file: Any, address: int, io: Io, writes: bool) -> None:
        self._device.make_current()
        interface = {"shape": (io.size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        moved = int((file.pwrite if writes else file.pread)(memory, io.size_bytes, io.offset).get())
        if moved != io.size_bytes:
            raise OSError(f"KvikIO moved {moved} of {io.size_bytes} bytes at offset {io.offset}")

    def close(self) -> None:
        """Give all of it back, the latest first."""
        self._held.close()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def not_past_the_host(ways: dict[Way, int]) -> str:
    """Which of these I/Os did not go past the host, so that they are no ceiling of what does; empty if all did."""
    if ways and all(way.is_gds for way in ways):
        return ""
    told = ", ".join(f"{count} by {way.label}" for way, count in ways.items()) or "none counted"
    return f"I/Os of KvikIO alone did not all go past the host: {told}"
