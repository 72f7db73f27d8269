"""Bare KvikIO in a process of its own: the slices of a mover, read by as many threads from the same file into GPU memory, and nothing else done to them.

The ceiling of `gds` (compat mode OFF, as the mover), and information where there is no way past the host (compat mode ON: KvikIO's own bounce).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.support.mover import STAGING_SLOT_BYTES, THREADS, Records, parts_of
from bench.support.process import Answer, Commanded, Handler, obey
from offloadd.cuda.cufile_stats import PathCounts
from offloadd.cuda.device import Device
from offloadd.cuda.gds import StagingSlot
from offloadd.cuda.gds_setup import configure
from offloadd.cuda.memory import DeviceMemory
from offloadd.model.enums import Way
from offloadd.mover.messages import Job, Operation
from offloadd.mover.slices import cut
from offloadd.tiers.format import Geometry


def slices_of(records: Records, slot_bytes: int, geometry: Geometry) -> list[tuple[int, int]]:
    """Offset and bytes of each I/O that a mover makes to read these blocks from slab 0."""
    found = []
    for part in parts_of(records, slot_bytes):
        job = Job(job=1, move=1, operation=Operation.READ_ONLY, slot_bytes=slot_bytes, blocks=part.tobytes())
        for piece in cut(job, thread_count=THREADS, staging_slot_bytes=STAGING_SLOT_BYTES):
            found.append((geometry.slot_offset(0, int(piece.records[0]["slot"]), slot_bytes), len(piece.records) * slot_bytes))
    return found


class BareReads(Commanded):
    """The other end. Raises CommandedError where KvikIO can't be had this way, with the reason."""

    def __init__(self, device: str, path: Path, slices: list[tuple[int, int]], *, compat: bool) -> None:
        super().__init__("bench.gpu.bare_kvikio", {"device": device, "path": str(path), "slices": slices, "compat": compat})

    def run(self) -> tuple[float, dict[str, int]]:
        """Read all slices once: seconds, and how many of them went which way, by the counts of cuFile and KvikIO."""
        answer = self.ask()
        ways: dict[str, int] = answer["ways"]
        return answer["seconds"], ways


def _begin(setup: Answer, held: contextlib.ExitStack) -> tuple[Answer, Handler]:
    device = Device.open(setup["device"])
    held.callback(device.close)
    slots, counts = _in_compat_mode(device, held) if setup["compat"] else _past_the_host(device, held)
    import kvikio

    file = kvikio.CuFile(setup["path"], "r")
    held.callback(file.close)
    slices = [(int(offset), int(size_bytes)) for offset, size_bytes in setup["slices"]]

    def run(_: Answer) -> Answer:
        before = counts()
        seconds = _read_all(device, file, slots, slices)
        done = counts() - before
        return {"seconds": seconds, "ways": {way.label: done.count(way) for way in Way if done.count(way)}}

    return {}, run


def _past_the_host(device: Device, held: contextlib.ExitStack) -> tuple[list[StagingSlot], Callable[[], PathCounts]]:
    """Registered slots, and KvikIO as the mover sets it up. Raises GdsUnavailable."""
    gds = configure(device, task_bytes=STAGING_SLOT_BYTES, threads=THREADS)
    held.callback(gds.close)
    slots = []
    for _ in range(THREADS):
        slots.append(StagingSlot.allocate(device, STAGING_SLOT_BYTES))
        # cuFile forgets memory before it is freed: nvidia-fs can deadlock over what is gone.
        held.callback(slots[-1].close)
    return slots, gds.proof.snapshot


def _in_compat_mode(device: Device, held: contextlib.ExitStack) -> tuple[list[DeviceMemory], Callable[[], PathCounts]]:
    """The same sizes and threads; O_DIRECT as well, or reads would be of the page cache."""
    import kvikio
    import kvikio.defaults

    kvikio.defaults.set(
        {
            "compat_mode": kvikio.CompatMode.ON,
            "gds_threshold": 0,
            "task_size": STAGING_SLOT_BYTES,
            "num_threads": THREADS,
            "bounce_buffer_size": STAGING_SLOT_BYTES,
            "auto_direct_io_read": True,
        }
    )
    monitor = kvikio.SummaryMonitor()

    def counts() -> PathCounts:
        return PathCounts(kvikio_posix=sum(totals["num_ops"] for name, totals in monitor.get().by_backend.items() if name != "GDS"))

    slots = []
    for _ in range(THREADS):
        slots.append(DeviceMemory.allocate(device, STAGING_SLOT_BYTES))
        held.callback(slots[-1].close)
    return slots, counts


def _read_all(device: Device, file: Any, slots: list[StagingSlot] | list[DeviceMemory], slices: list[tuple[int, int]]) -> float:
    """Seconds; a thread a slot, each with one read in flight."""
    waiting: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    failures: list[Exception] = []

    def work(slot: StagingSlot | DeviceMemory) -> None:
        device.make_current()
        try:
            while (one := waiting.get()) is not None:
                offset, size_bytes = one
                interface = {"shape": (size_bytes,), "typestr": "|u1", "data": (slot.address, False), "version": 3, "strides": None}
                moved_bytes = int(file.pread(SimpleNamespace(__cuda_array_interface__=interface), size_bytes, offset).get())
                if moved_bytes != size_bytes:
                    raise OSError(f"KvikIO read {moved_bytes} of {size_bytes} bytes at offset {offset}")
        except (OSError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    for one in slices:
        waiting.put(one)
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return seconds


if __name__ == "__main__":
    obey(_begin)
