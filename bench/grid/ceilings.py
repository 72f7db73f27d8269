"""What the machine itself does with as many bytes: raw I/Os of a volume's slots, and copies within memory. Each runs in turn with what it bounds."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.grid.volumes import GridVolume
from bench.support.ios import Io, over_threads, slices_of
from bench.support.mover import ARENA_THREADS, STAGING_SLOT_BYTES, THREADS
from bench.support.restoring import COPY_BYTES, copy
from bench.support.rows import Case, Operation
from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import map_private
from offloadd.tiers.format import slot_bytes_for
from offloadd.tiers.volume_io import read_full, sync, write_full
from offloadd.units import MIB

#: The daemon spreads a request over volumes in stripes of so many payload bytes.
STRIPE_BYTES = 8 * MIB
#: Copies of more run over the same memory again: it is far beyond any cache.
COPY_BYTES_MAX = 512 * MIB


class NoCeiling(Exception):
    """There is nothing to compare with here; says why."""


def requests_of(case: Case, slots: Sequence[Sequence[int]]) -> list[list[Io]]:
    """The I/Os of each request in flight. `slots`: offsets by volume, which the requests take one after the other, again from the first where they end."""
    slot_bytes = slot_bytes_for(case.block_bytes)
    stripe = max(1, STRIPE_BYTES // case.block_bytes)
    taken = [0] * len(slots)
    requests = []
    turn = 0
    # Every GPU has as many requests in flight as there are.
    for _ in range(case.queue_depth * max(1, case.gpu_count)):
        mine: list[list[int]] = [[] for _ in slots]
        for first in range(0, case.block_count, stripe):
            volume = turn % len(slots)
            turn += 1
            for _ in range(min(stripe, case.block_count - first)):
                mine[volume].append(slots[volume][taken[volume] % len(slots[volume])])
                taken[volume] += 1
        requests.append([Io(volume, offset, size) for volume, some in enumerate(mine) for offset, size in slices_of(some, slot_bytes)])
    return requests


class RawIo:
    """Reads of slots that the volumes hold, or writes of as many bytes to files beside them, past the page cache. A context manager."""

    def __init__(self, case: Case, volumes: Sequence[GridVolume]) -> None:
        """Raises NoCeiling, OSError."""
        self.writes = case.operation is Operation.EVICT
        direct = all(_direct(volume.path) for volume in volumes)
        verb = "O_DSYNC writes" if self.writes else "reads"
        self.name = f"raw {verb}, O_DIRECT" if direct else f"raw {verb} through the page cache"
        slot_bytes = slot_bytes_for(case.block_bytes)
        count = -(-case.block_count * case.queue_depth * max(1, case.gpu_count) // len(volumes)) + STRIPE_BYTES // case.block_bytes
        self._files: list[Path] = []
        self._fds: list[int] = []
        try:
            if self.writes:
                slots = [self._scratch(volume, count, slot_bytes) for volume in volumes]
                self.paths = [str(file) for file in self._files]
            else:
                slots = [volume.written_slots(slot_bytes, count) for volume in volumes]
                self.paths = [str(volume.path) for volume in volumes]
                self._fds += [os.open(volume.path, os.O_RDONLY | os.O_CLOEXEC | _direct(volume.path)) for volume in volumes]
            if not all(slots):
                raise NoCeiling("a volume has no slab with such slots to read from")
            self._requests = requests_of(case, slots)
            in_flight = sum(map(len, self._requests))
            self.thread_count = min(in_flight, THREADS * len(volumes))
            longest = max(io.size_bytes for request in self._requests for io in request)
            self._buffers = [map_private(longest) for _ in range(self.thread_count)]
        except BaseException:
            self.close()
            raise

    def _scratch(self, volume: GridVolume, count: int, slot_bytes: int) -> list[int]:
        """Slots in a file that was written once, as the daemon writes slabs: the first write into a hole costs more."""
        if volume.scratch is None:
            raise NoCeiling(f"{volume.path} is a device: raw writes to it would overwrite its volume")
        size_bytes = count * slot_bytes
        status = os.statvfs(volume.scratch.parent)
        if status.f_bavail * status.f_frsize < size_bytes:
            raise NoCeiling(f"{volume.scratch.parent} has no room for {size_bytes} bytes to write beside the volume")
        fd = os.open(volume.scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DSYNC | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        self._files.append(volume.scratch)
        content = map_private(STAGING_SLOT_BYTES)
        try:
            for offset in range(0, size_bytes, STAGING_SLOT_BYTES):
                write_full(fd, content.bytes.data[: min(STAGING_SLOT_BYTES, size_bytes - offset)], offset, str(volume.scratch))
        finally:
            content.close()
        sync(fd, str(volume.scratch))
        os.close(self._fds.pop())
        self._fds.append(os.open(volume.scratch, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC | _direct(volume.scratch)))
        return list(range(0, size_bytes, slot_bytes))

    def run(self, request_count: int) -> float:
        """Seconds of the I/Os of so many requests, as many in flight as the case says and the volumes have threads."""
        return over_threads(self.thread_count, self.ios(request_count), self._one)

    def ios(self, request_count: int) -> list[Io]:
        """The I/Os of so many requests, one after the other; `paths` has the files."""
        return [io for number in range(request_count) for io in self._requests[number % len(self._requests)]]

    def _one(self, thread: int, io: Io) -> None:
        buffer = self._buffers[thread].bytes.data[: io.size_bytes]
        (write_full if self.writes else read_full)(self._fds[io.volume], buffer, io.offset, self.name)

    def close(self) -> None:
        """Close and remove what was made."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files.clear()
        for buffer in self.__dict__.pop("_buffers", ()):
            buffer.close()

    def __enter__(self) -> "RawIo":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _direct(path: Path) -> int:
    """O_DIRECT where the file system has it."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


class Memcpy:
    """Copies within memory with the threads of the arena's lane. The process must run under the mover's glibc tunable. A context manager."""

    name = f"memcpy, {ARENA_THREADS} threads"

    def __init__(self, case: Case) -> None:
        """Raises OSError."""
        self._payload_bytes = case.payload_bytes
        size_bytes = min(case.payload_bytes, COPY_BYTES_MAX)
        if size_bytes < 1:
            raise InvalidRequest(f"a request of {size_bytes} bytes can't be copied; at least 1 is needed")
        self._source, self._target = map_private(size_bytes), map_private(size_bytes)
        self._source.bytes[:] = 1

    def run(self, request_count: int) -> float:
        """Seconds of as many bytes as so many requests move."""
        seconds, left = 0.0, self._payload_bytes * request_count
        while left:
            size = min(left, self._source.bytes.size)
            seconds += self._copy(size)
            left -= size
        return seconds

    def _copy(self, size_bytes: int) -> float:
        target, source = self._target.bytes[:size_bytes], self._source.bytes[:size_bytes]
        if size_bytes > COPY_BYTES:
            return copy(target, source)
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    def close(self) -> None:
        """Unmap."""
        self._source.close()
        self._target.close()

    def __enter__(self) -> "Memcpy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
