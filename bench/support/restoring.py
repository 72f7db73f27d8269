"""Restores by a mover alone: from a volume against reads through the same staging slots, and from the arena against memcpy."""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.support.copier import Copier
from bench.support.cpu import cpu_seconds
from bench.support.mover import ARENA_THREADS, LaneEnd, MoverProcess, Records, layout_of, make_records
from bench.support.workload import Blocks
from offloadd.memory.mapping import MADV_HUGEPAGE, MADV_POPULATE_WRITE, Bytes, Mapping, map_memories
from offloadd.memory.memfd import create_sealed
from offloadd.mover.messages import Operation
from offloadd.tiers.format import Geometry, slot_bytes_for
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import open_volume
from offloadd.units import GIB, MIB, SECTOR_BYTES, align_up

#: Pieces of the reference copy, as long as an arena slice.
COPY_BYTES = 4 * MIB


def make_volume(path: Path, work: Blocks) -> Geometry:
    """A volume with one slab that takes all blocks of the workload."""
    slab_bytes = align_up(work.block_count * (slot_bytes_for(work.block_bytes) + 64) + MIB, MIB)
    return format_volume(str(path), volume_bytes=4 * slab_bytes + 8 * MIB, slab_bytes=slab_bytes)


@dataclass(slots=True)
class Series:
    """Seconds and CPU seconds of one way of moving the workload, round by round over all process starts."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    stage_ns: dict[str, int] = field(default_factory=dict)

    def take(self, mover: MoverProcess, lane: LaneEnd, operation: Operation, records: Records, slot_bytes: int, *, verify: bool = True) -> None:
        """Move all blocks once more. RuntimeError if one failed."""
        before = cpu_seconds([mover.pid])
        self.seconds.append(lane.run(operation, records, slot_bytes, verify=verify))
        self.cpu_s += cpu_seconds([mover.pid]) - before
        for stage, nanoseconds in lane.stage_ns.items():
            self.stage_ns[stage] = self.stage_ns.get(stage, 0) + nanoseconds

    def rate(self, size_bytes: int) -> float:
        """Bytes a second by the median."""
        return size_bytes / float(np.median(self.seconds))

    def cpu_per_gb(self, size_bytes: int) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_s / len(self.seconds) / (size_bytes / 1e9)


def volume_restores(path: Path, work: Blocks) -> dict[str, Series]:
    """`raw`, `restore` and `unverified`, interleaved, each start with a fresh mover over the volume at `path`."""
    geometry = make_volume(path, work)
    slot_bytes = slot_bytes_for(work.block_bytes)
    layout = layout_of(work.block_bytes, work.block_count, work.plane_count)
    fd = create_sealed("engine", work.payload_bytes)
    records = make_records(work.block_bytes, work.block_count, scattered=work.scattered)
    found = {name: Series() for name in ("raw", "restore", "unverified", "raw_beside_copies")}
    try:
        with PresentMemory(fd, work.payload_bytes) as memory, Copier() as copier:
            original = fill(memory.bytes)
            for start in range(work.start_count):
                file = open_volume(str(path), busy_wait_s=5.0)
                try:
                    with MoverProcess() as mover:
                        mover.map_region(1, fd, layout, work.payload_bytes)
                        lane = mover.add_lane(1, file, geometry)
                        if start == 0:
                            lane.run(Operation.EVICT, records, slot_bytes)
                            memory.bytes[:] = 0
                        lane.run(Operation.RESTORE, records, slot_bytes)
                        if not (memory.bytes == original).all():
                            raise RuntimeError("restored bytes differ from those evicted")
                        ways = (("raw", Operation.READ_ONLY, True), ("restore", Operation.RESTORE, True), ("unverified", Operation.RESTORE, False))
                        for _ in range(work.round_count):
                            for name, operation, verify in ways:
                                found[name].take(mover, lane, operation, records, slot_bytes, verify=verify)
                            copier.run(found["restore"].rate(work.payload_bytes))
                            found["raw_beside_copies"].seconds.append(lane.run(Operation.READ_ONLY, records, slot_bytes))
                            copier.rest()
                finally:
                    file.close()
    finally:
        os.close(fd)
    return found


def arena_restores(work: Blocks) -> dict[str, Series]:
    """`memcpy` (this process, which must run under the mover's glibc tunable), `restore`, `unverified`, and `numpy`, interleaved.

    `numpy`: a restore by a mover that copies with NumPy, in turn with the one that copies as it was built.
    """
    slot_bytes = align_up(work.block_bytes, SECTOR_BYTES)
    arena_bytes = align_up(slot_bytes * work.block_count, 2 * MIB)
    layout = layout_of(work.block_bytes, work.block_count, work.plane_count)
    records = make_records(work.block_bytes, work.block_count, scattered=work.scattered)
    fd, arena_fd = create_sealed("engine", work.payload_bytes), create_sealed("arena", arena_bytes)
    found = {name: Series() for name in ("memcpy", "restore", "unverified", "numpy")}
    try:
        with PresentMemory(fd, work.payload_bytes) as memory, PresentMemory(arena_fd, arena_bytes) as arena:
            original = fill(memory.bytes)
            for _ in range(work.start_count):
                with MoverProcess() as mover, MoverProcess("host", "--no-native") as by_numpy:
                    lanes = {}
                    for one in (mover, by_numpy):
                        one.map_region(1, fd, layout, work.payload_bytes)
                        one.map_arena(arena_fd, arena_bytes)
                        lanes[one] = lane = one.add_lane(1)
                        lane.run(Operation.ARENA_EVICT, records, slot_bytes)
                        memory.bytes[:] = 0
                        lane.run(Operation.ARENA_RESTORE, records, slot_bytes)
                        if not (memory.bytes == original).all():
                            raise RuntimeError("restored bytes differ from those evicted")
                        lane.run(Operation.ARENA_RESTORE, records, slot_bytes, verify=False)
                    for _ in range(work.round_count):
                        before = cpu_seconds([os.getpid()])
                        found["memcpy"].seconds.append(copy(memory.bytes, arena.bytes[: memory.bytes.size]))
                        found["memcpy"].cpu_s += cpu_seconds([os.getpid()]) - before
                        for name, one, verify in (("unverified", mover, False), ("restore", mover, True), ("numpy", by_numpy, True)):
                            found[name].take(one, lanes[one], Operation.ARENA_RESTORE, records, slot_bytes, verify=verify)
    finally:
        os.close(fd)
        os.close(arena_fd)
    return found


class PresentMemory:
    """A mapping of a memfd as the mover makes it: huge pages advised, all pages present. Unmapped at the end of the `with` block."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._mapping = map_memories([fd], [size_bytes])
        self._mapping.advise(MADV_HUGEPAGE)
        self._mapping.advise(MADV_POPULATE_WRITE)

    def __enter__(self) -> Mapping:
        return self._mapping

    def __exit__(self, *_: object) -> None:
        self._mapping.close()


def fill(target: Bytes) -> Bytes:
    """Fill with bytes that tell places apart; returns a copy of them."""
    target[:] = np.random.default_rng(3).integers(0, 256, target.size, dtype=np.uint8)
    return target.copy()


def copy(target: Bytes, source: Bytes) -> float:
    """Copy with as many threads as a lane has, in pieces as long as its slices; seconds."""

    def part(first: int) -> None:
        for begin in range(first * COPY_BYTES, target.size, ARENA_THREADS * COPY_BYTES):
            np.copyto(target[begin : begin + COPY_BYTES], source[begin : begin + COPY_BYTES])

    threads = [threading.Thread(target=part, args=(number,)) for number in range(ARENA_THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def shared_memory_dir(need_bytes: int) -> Path | None:
    """A directory in memory with room for `need_bytes`, or None."""
    path = Path("/dev/shm")
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return path if status.f_bavail * status.f_frsize > need_bytes + GIB else None
