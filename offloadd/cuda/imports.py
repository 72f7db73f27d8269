"""GPU memory of other processes: CUDA IPC handles, and descriptors of virtual memory chunks."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError, check, load
from offloadd.errors import InvalidRequest

#: Of memory and of events; fixed by the driver's ABI.
IPC_HANDLE_BYTES = 64


class IpcMemory:
    """A reference to memory that `IpcImports` has open: the whole allocation of the other process, whichever part of it is wanted."""

    def __init__(self, imports: "IpcImports", handle: bytes, address: int, size_bytes: int) -> None:
        """See `IpcImports.open`."""
        self.address = address
        self.size_bytes = size_bytes
        self._imports = imports
        self._handle = handle
        self._closed = False

    def close(self) -> None:
        """Give the reference back; the last one closes the mapping. The same wait as `DeviceMemory.close`. May be called again."""
        if not self._closed:
            self._closed = True
            self._imports._release(self._handle)


@dataclass(slots=True)
class _Mapping:
    address: int
    size_bytes: int
    references: int


class IpcImports:
    """IPC memory handles that are open on one device, each once, with a count of references. Any thread may call.

    A mapping that stays open keeps the GPU memory of an engine that died, so whoever opens one closes it when the owner ends.
    """

    def __init__(self, device: Device) -> None:
        """Opens nothing yet."""
        self._device = device
        self._lock = threading.Lock()
        self._mappings: dict[bytes, _Mapping] = {}

    def open(self, handle: bytes) -> IpcMemory:
        """Map the allocation of a `cudaIpcMemHandle`. `size_bytes` of the answer is what the driver mapped, not what a client says.

        Raises InvalidRequest: not 64 bytes, or memory of another device. CudaError: the exporting process has ended, or is this one.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise InvalidRequest(f"CUDA IPC memory handle has {len(handle)} bytes; it must have {IPC_HANDLE_BYTES}")
        with self._lock:
            mapping = self._mappings.get(handle)
            if mapping is None:
                mapping = self._mappings[handle] = self._map(handle)
            mapping.references += 1
            return IpcMemory(self, handle, mapping.address, mapping.size_bytes)

    def _map(self, handle: bytes) -> _Mapping:
        self._device.make_current()
        cu = load()
        raw = cu.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle, IPC_HANDLE_BYTES)
        # The only flag that there is. Without it the driver refuses every handle.
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = _opened(cu.cuIpcOpenMemHandle(raw, flags), f"open a CUDA IPC memory handle on {self._device}")
        try:
            what = f"measure imported memory at {int(pointer):#x}"
            ordinal = check(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer), what)
            if int(ordinal) != self._device.ordinal:
                raise InvalidRequest(f"CUDA IPC memory handle is for memory of cuda:{ordinal}; this mover works on {self._device}")
            base, size_bytes = check(cu.cuMemGetAddressRange(pointer), what)
        except BaseException:
            check(cu.cuIpcCloseMemHandle(pointer), f"close imported memory at {int(pointer):#x}")
            raise
        # Small allocations share a block of the driver, and it may be that one that is measured: only what follows the pointer counts.
        return _Mapping(int(pointer), int(base) + int(size_bytes) - int(pointer), 0)

    def _release(self, handle: bytes) -> None:
        with self._lock:
            mapping = self._mappings[handle]
            mapping.references -= 1
            if mapping.references:
                return
            del self._mappings[handle]
        # Without the lock: the driver waits for all work here, and others shall open meanwhile. It counts openings itself, so this closes only ours.
        self._device.make_current()
        check(load().cuIpcCloseMemHandle(mapping.address), f"close imported memory of {mapping.size_bytes} bytes at {mapping.address:#x}")


def _opened(result: tuple[Any, ...], operation: str) -> Any:
    """What opening an IPC handle gave. Raises CudaError with what is usually behind the code."""
    try:
        return check(result, operation)
    except CudaError as error:
        if error.name == "CUDA_ERROR_INVALID_CONTEXT":
            why = "the handle was exported by this very process, which can't open its own"
        else:
            why = "the process that exported it has ended, or shares neither /dev/shm nor the process ids with this one (containers: --ipc and --pid)"
        raise CudaError(operation, error.name, f"{error.text}; {why}") from error


def open_event_handle(device: Device, handle: bytes) -> Any:
    """The driver's event for a `cudaIpcEventHandle`. Raises InvalidRequest unless it has 64 bytes, CudaError as `IpcImports.open`."""
    if len(handle) != IPC_HANDLE_BYTES:
        raise InvalidRequest(f"CUDA IPC event handle has {len(handle)} bytes; it must have {IPC_HANDLE_BYTES}")
    device.make_current()
    cu = load()
    raw = cu.CUipcEventHandle()
    ctypes.memmove(raw.getPtr(), handle, IPC_HANDLE_BYTES)
    return _opened(cu.cuIpcOpenEventHandle(raw), f"open a CUDA IPC event handle on {device}")


@dataclass(frozen=True, slots=True)
class VmmChunk:
    """The beginning of a chunk of virtual memory management (`cuMemCreate`), exported as a descriptor, which may be closed after the import."""

    fd: int
    size_bytes: int


class VmmMemory:
    """Chunks of another process, mapped side by side at `address`: allocators such as PyTorch's expandable segments make one tensor of many."""

    def __init__(self, device: Device, address: int, size_bytes: int) -> None:
        """See `open`."""
        self.address = address
        self.size_bytes = size_bytes
        self._device = device
        self._mapped: list[tuple[int, int]] = []
        self._closed = False

    @classmethod
    def open(cls, device: Device, chunks: Sequence[VmmChunk]) -> "VmmMemory":
        """Import and map, readable and writable. If it raises, nothing stays mapped.

        Raises InvalidRequest: a size that is no multiple of the granularity, or a chunk of another device. CudaError: a descriptor that is no chunk, or
        one that has less than `size_bytes`.
        """
        cu = load()
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.ordinal
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(check(cu.cuMemGetAllocationGranularity(properties, minimum), f"read the granularity of {device}"))
        for number, chunk in enumerate(chunks):
            if chunk.size_bytes < 1 or chunk.size_bytes % granularity:
                raise InvalidRequest(f"chunk {number} has {chunk.size_bytes} bytes; it must be a multiple of {granularity}, the granularity of {device}")
        size_bytes = sum(chunk.size_bytes for chunk in chunks)
        if not size_bytes:
            raise InvalidRequest("memory of 0 chunks can't be mapped; at least 1 is needed")
        device.make_current()
        address = int(check(cu.cuMemAddressReserve(size_bytes, 0, 0, 0), f"reserve {size_bytes} bytes of addresses on {device}"))
        memory = cls(device, address, size_bytes)
        try:
            for number, chunk in enumerate(chunks):
                memory._map(cu, number, chunk)
            access = cu.CUmemAccessDesc()
            access.location = properties.location
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            check(cu.cuMemSetAccess(address, size_bytes, [access], 1), f"make {size_bytes} bytes of imported memory accessible on {device}")
        except BaseException:
            memory.close()
            raise
        return memory

    def _map(self, cu: Any, number: int, chunk: VmmChunk) -> None:
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        what = f"import chunk {number} of {chunk.size_bytes} bytes from descriptor {chunk.fd} on {self._device}"
        handle = check(cu.cuMemImportFromShareableHandle(chunk.fd, kind), what, "the descriptor must come from cuMemExportToShareableHandle")
        try:
            location = check(cu.cuMemGetAllocationPropertiesFromHandle(handle), what).location
            if int(location.id) != self._device.ordinal:
                raise InvalidRequest(f"chunk {number} is memory of cuda:{location.id}; this mover works on {self._device}")
            at = self.address + sum(size_bytes for _, size_bytes in self._mapped)
            check(cu.cuMemMap(at, chunk.size_bytes, 0, handle, 0), f"map chunk {number}", f"it must have {chunk.size_bytes} bytes at least")
            self._mapped.append((at, chunk.size_bytes))
        finally:
            # A mapping keeps the memory; the handle would only be one more thing to give back.
            check(cu.cuMemRelease(handle), f"release the handle of chunk {number}")

    def close(self) -> None:
        """Unmap and give the addresses back. The same wait as `DeviceMemory.close`. May be called again, also after an error."""
        if self._closed:
            return
        cu = load()
        self._device.make_current()
        while self._mapped:
            at, size_bytes = self._mapped[-1]
            check(cu.cuMemUnmap(at, size_bytes), f"unmap {size_bytes} bytes of imported memory at {at:#x}")
            self._mapped.pop()
        self._closed = True
        check(cu.cuMemAddressFree(self.address, self.size_bytes), f"give back {self.size_bytes} bytes of addresses at {self.address:#x}")
