"""What a GPU's own ways do with as many bytes: copies between page-locked memory and the GPU, and KvikIO without anything of ours around it."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from bench.grid.ceilings import Io, over_threads
from offloadd.cuda.device import Device
from offloadd.cuda.gds import StagingSlot
from offloadd.cuda.gds_setup import Gds, configure
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.plain import copy
from offloadd.cuda.streams import Stream
from offloadd.memory.mapping import map_private
from offloadd.units import MIB

#: Copies of more run over the same memory again.
COPY_BYTES_MAX = 256 * MIB
COPY_TIMEOUT_S = 300.0
#: Of KvikIO's pool: an I/O holds one until it ends.
THREADS_MAX = 64


class PageLockedCopy:
    """Copies between page-locked host memory and memory of the GPU, one after the other on one stream."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        """`size_bytes`: of one copy, as far as COPY_BYTES_MAX. Raises CudaError, OSError."""
        self._size_bytes = min(size_bytes, COPY_BYTES_MAX)
        with ExitStack() as held:
            self._stream = Stream.create(device)
            held.callback(self._stream.close)
            self._device_side = DeviceMemory.allocate(device, self._size_bytes)
            held.callback(self._device_side.close)
            self._host_side = map_private(self._size_bytes)
            held.callback(self._host_side.close)
            held.callback(HostRegistration.register(device, self._host_side.bytes.ctypes.data, self._host_side.bytes.nbytes).close)
            #: Gives all of it back, the latest first.
            self._held = held.pop_all()

    def run(self, total_bytes: int, *, to_host: bool) -> float:
        """Seconds of copies of so many bytes together."""
        host, device = self._host_side.bytes.ctypes.data, self._device_side.address
        target, source = (host, device) if to_host else (device, host)
        start = time.perf_counter()
        for at in range(0, total_bytes, self._size_bytes):
            copy(target, source, min(self._size_bytes, total_bytes - at), self._stream)
        self._stream.synchronize(COPY_TIMEOUT_S)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give all of it back."""
        self._held.close()


class BareKvikio:
    """KvikIO's `pread` and `pwrite` into registered memory of the GPU, in a process that does nothing else with cuFile. One in a process."""

    def __init__(self, device: Device, *, slice_bytes: int) -> None:
        """Compat mode is off: a machine without a way past the host has no such ceiling. Raises GdsUnavailable."""
        self._gds: Gds = configure(device, task_bytes=slice_bytes, threads=THREADS_MAX)
        self._device = device
        self._slice_bytes = slice_bytes
        #: One for each thread that was needed so far.
        self._slots: list[StagingSlot] = []

    def run(self, paths: Sequence[str], ios: Sequence[Io], *, threads: int, writes: bool) -> float:
        """Seconds of these I/Os with so many threads, at most THREADS_MAX; writes are synced before the clock stops.

        Raises GdsUnavailable or CudaError without room for a slot a thread, OSError, RuntimeError of KvikIO.
        """
        import kvikio

        self._device.make_current()
        while len(self._slots) < threads:
            self._slots.append(StagingSlot.allocate(self._device, self._slice_bytes))
        files = [kvikio.CuFile(path, "r+" if writes else "r") for path in paths]
        try:
            seconds = over_threads(threads, ios, lambda thread, io: self._one(files[io.volume], self._slots[thread], io, writes))
            start = time.perf_counter()
            if writes:
                _sync(paths)
            return seconds + time.perf_counter() - start
        finally:
            for file in files:
                file.close()

    def _one(self, file: Any, slot: StagingSlot, io: Io, writes: bool) -> None:
        self._device.make_current()
        part = SimpleNamespace(__cuda_array_interface__={**slot.__cuda_array_interface__, "shape": (io.size_bytes,)})
        moved = int((file.pwrite if writes else file.pread)(part, io.size_bytes, io.offset).get())
        if moved != io.size_bytes:
            raise OSError(f"KvikIO moved {moved} of {io.size_bytes} bytes")

    def close(self) -> None:
        """Give all of it back."""
        for slot in self._slots:
            slot.close()
        self._gds.close()


def _sync(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
