"""Memory of our own: allocated on a GPU, or host memory that it reaches by DMA."""

import mmap
import os
import resource
from typing import Any

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError, check, load
from offloadd.units import GIB

#: An odd number, so that blocks of whole KiB differ though the bytes repeat; drawing more would only hold up the mover's control messages.
RANDOM_BYTES = (1 << 20) - 1


class DeviceMemory:
    """Memory allocated on a GPU, at `address`, `size_bytes` long."""

    def __init__(self, device: Device, pointer: Any, size_bytes: int) -> None:
        """See `allocate`."""
        self.device = device
        self.address = int(pointer)
        self.size_bytes = size_bytes
        self._closed = False

    @classmethod
    def allocate(cls, device: Device, size_bytes: int) -> "DeviceMemory":
        """Allocate. Raises ValueError below 1 byte, CudaError naming the size and what is free when the GPU has not got it."""
        if size_bytes < 1:
            raise ValueError(f"{size_bytes} bytes can't be allocated on {device}; at least 1 is needed")
        device.make_current()
        try:
            pointer = check(load().cuMemAlloc(size_bytes), f"allocate {size_bytes} bytes on {device}")
        except CudaError as error:
            raise CudaError(error.operation, error.name, f"{error.text}; {device.free_bytes()} of {device.total_bytes} bytes are free") from error
        return cls(device, pointer, size_bytes)

    def close(self) -> None:
        """Free. The driver first waits for all work of the device, so nothing may be queued that waits for an engine. May be called again."""
        if self._closed:
            return
        self.device.make_current()
        self._closed = True
        check(load().cuMemFree(self.address), f"free {self.size_bytes} bytes on {self.device}")


def random_memory(device: Device, size_bytes: int) -> DeviceMemory:
    """Memory filled with random bytes, which repeat after RANDOM_BYTES. Raises as `DeviceMemory.allocate`; nothing is held then."""
    memory = DeviceMemory.allocate(device, size_bytes)
    random = os.urandom(min(size_bytes, RANDOM_BYTES))
    try:
        for begin in range(0, size_bytes, len(random)):
            count = min(len(random), size_bytes - begin)
            check(load().cuMemcpyHtoD(memory.address + begin, random, count), f"fill {count} bytes on {device}")
    except BaseException:
        memory.close()
        raise
    return memory


class HostRegistration:
    """Host memory that is page-locked and known to CUDA on every device, so that copies of it go by DMA and don't wait."""

    def __init__(self, device: Device) -> None:
        """See `register`."""
        self._device = device
        #: Address and length of what is registered.
        self._chunks: list[tuple[int, int]] = []

    @classmethod
    def register(cls, device: Device, address: int, size_bytes: int, *, chunk_bytes: int = GIB) -> "HostRegistration":
        """Page-lock memory that exists, chunk by chunk: each call to the driver pins its pages at once, and holds its locks and the process's as long.

        Long for a large arena, so do it in a thread of its own. If it raises, nothing is registered. ValueError: address or chunk is not a multiple of the page
        size. CudaError: the system refuses; it names the bytes.
        """
        if address % mmap.PAGESIZE or chunk_bytes % mmap.PAGESIZE or chunk_bytes < 1:
            raise ValueError(f"memory at {address:#x} in chunks of {chunk_bytes} bytes can't be page-locked; both must be multiples of {mmap.PAGESIZE}")
        if size_bytes < 1:
            raise ValueError(f"{size_bytes} bytes can't be page-locked; at least 1 is needed")
        registration = cls(device)
        try:
            for begin in range(0, size_bytes, chunk_bytes):
                registration._add(address + begin, min(chunk_bytes, size_bytes - begin), size_bytes)
        except BaseException:
            registration.close()
            raise
        return registration

    @property
    def registered_bytes(self) -> int:
        """Bytes that are page-locked by this registration."""
        return sum(size_bytes for _, size_bytes in self._chunks)

    def _add(self, address: int, size_bytes: int, whole_bytes: int) -> None:
        self._device.make_current()
        cu = load()
        operation = f"page-lock {size_bytes} bytes of host memory at {address:#x} ({self.registered_bytes} of {whole_bytes} bytes were done)"
        check(cu.cuMemHostRegister(address, size_bytes, cu.CU_MEMHOSTREGISTER_PORTABLE), operation, _memlock_hint())
        self._chunks.append((address, size_bytes))

    def close(self) -> None:
        """Undo it, with the same wait as `DeviceMemory.close`. May be called again, also after an error: it goes on with what is left."""
        while self._chunks:
            address, size_bytes = self._chunks.pop()
            self._device.make_current()
            check(load().cuMemHostUnregister(address), f"unregister {size_bytes} bytes of host memory at {address:#x}")


def is_reached(device: Device, address: int) -> bool:
    """Whether kernels of the GPU reach this byte of host memory, and at the same address: it is page-locked, and the driver says so."""
    device.make_current()
    cu = load()
    code, pointer = cu.cuMemHostGetDevicePointer(address, 0)
    return code == cu.CUresult.CUDA_SUCCESS and int(pointer) == address


def _memlock_hint() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return f"RLIMIT_MEMLOCK is {limit} (LimitMEMLOCK= in systemd, --ulimit memlock=-1 in containers)"
