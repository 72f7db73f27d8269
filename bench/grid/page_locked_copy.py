"""What a GPU's copy engines do with as many bytes: copies between page-locked memory and the GPU."""

import time
from contextlib import ExitStack

from bench.support.page_locked import page_locked
from offloadd.cuda.device import Device
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.plain import copy
from offloadd.cuda.streams import Stream
from offloadd.units import MIB

#: Copies of more run over the same memory again.
COPY_BYTES_MAX = 256 * MIB
COPY_TIMEOUT_S = 300.0


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
            self._host_address = held.enter_context(page_locked(device, self._size_bytes))
            #: Gives all of it back, the latest first.
            self._held = held.pop_all()

    def run(self, total_bytes: int, *, to_host: bool) -> float:
        """Seconds of copies of so many bytes together."""
        host, device = self._host_address, self._device_side.address
        target, source = (host, device) if to_host else (device, host)
        start = time.perf_counter()
        for at in range(0, total_bytes, self._size_bytes):
            copy(target, source, min(self._size_bytes, total_bytes - at), self._stream)
        self._stream.synchronize(COPY_TIMEOUT_S)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give all of it back."""
        self._held.close()
