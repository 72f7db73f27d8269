"""GPU memory that an engine shares with the daemon: a handle or descriptors that another process can open."""

import math
import os
import resource
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offloadd.client.cuda.driver import Context, checked, handle_bytes, load_driver
from offloadd.errors import InvalidRequest

#: Descriptors that one SCM_RIGHTS message carries (SCM_MAX_FD of Linux). A memory is handed over in one message.
CHUNKS_MAX = 253

_SEGMENTS_HINT = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False makes PyTorch use cudaMalloc; in vLLM do so without sleep mode"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One physical chunk of virtual memory management: a descriptor for cuMemImportFromShareableHandle, and how much of it is mapped, from its start."""

    fd: int
    chunk_bytes: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class DeviceMemory:
    """One range of GPU memory to register regions in: byte 0 is the first byte that was exported, whatever the allocation behind it looks like.

    It is either part of one cudaMalloc allocation (`ipc_handle`) or lies in `chunks` of virtual memory management, which the other side maps one behind the
    other. Both begin `offset_bytes` before byte 0 and have `allocation_bytes`. It keeps the exported tensor or array alive until it is closed. A chunk's
    descriptor keeps the GPU memory itself: close it when no region uses it any more.
    """

    #: As `nvidia-smi -L` prints it. Ordinals differ between processes.
    device_uuid: str
    memory_bytes: int
    offset_bytes: int
    allocation_bytes: int
    #: Empty, or IPC_HANDLE_BYTES: it names the allocation's base.
    ipc_handle: bytes
    #: Empty, or in the order of addresses. They belong to this object.
    chunks: tuple[Chunk, ...]
    _owner: object
    _finalizer: "weakref.finalize[..., DeviceMemory] | None" = field(init=False)

    def __post_init__(self) -> None:
        # A forgotten descriptor would keep the GPU memory until the process ends.
        self._finalizer = weakref.finalize(self, _close_all, [chunk.fd for chunk in self.chunks])

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._finalizer is None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of the chunks. Raises InvalidRequest once it is closed."""
        if self.closed:
            raise InvalidRequest("the device memory is closed")
        return tuple(chunk.fd for chunk in self.chunks)

    def close(self) -> None:
        """Close the descriptors and let go of the tensor. May be called again."""
        finalizer, self._finalizer, self._owner = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> "DeviceMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = f"{len(self.chunks)} chunks" if self.chunks else "IPC handle"
        return f"DeviceMemory(device_uuid={self.device_uuid!r}, memory_bytes={self.memory_bytes}, {kind}{', closed' if self.closed else ''})"


def export_memory(source: Any) -> DeviceMemory:
    """The memory of a torch CUDA tensor, a CuPy array or anything with `__cuda_array_interface__`, from its first to its last element, the gaps of its strides
    included.

    Nothing is copied, and nothing waits for work on it. Raises InvalidRequest for memory that another process can't open; the message says what allocated it
    and which setting helps. Raises PathUnavailable without a CUDA driver, and for its errors.
    """
    address, size_bytes, device = _tensor_range(source) if hasattr(source, "data_ptr") else _array_range(source)
    return _export(address, size_bytes, device, source)


def export_pointer(address: int, size_bytes: int, device: int | None = None) -> DeviceMemory:
    """`size_bytes` bytes of GPU memory from `address` on, which must stay allocated until no region uses the result. `device`, its ordinal in this process, is
    checked if given. Raises as `export_memory`."""
    return _export(address, size_bytes, device, None)


# ---- what to export ----


def _tensor_range(tensor: Any) -> tuple[int, int, int | None]:
    """Address, bytes and device ordinal."""
    if tensor.device.type != "cuda":
        raise InvalidRequest(f"the tensor is on device {str(tensor.device)!r}; 'cuda' is needed (share host memory with HostMemory)")
    item_bytes = int(tensor.element_size())
    return int(tensor.data_ptr()), _span_bytes(tuple(tensor.shape), [step * item_bytes for step in tensor.stride()], item_bytes), tensor.device.index


def _array_range(array: Any) -> tuple[int, int, int | None]:
    """Address, bytes, and no ordinal: the interface does not tell it. Its stream does not matter, since nothing is read here."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise InvalidRequest(f"a {type(array).__name__} has neither `data_ptr` nor `__cuda_array_interface__`: it is no GPU array")
    address, read_only = interface["data"]
    if read_only:
        raise InvalidRequest(f"the {type(array).__name__} is read-only; a restore writes into its memory")
    shape, strides, item_bytes = tuple(interface["shape"]), interface.get("strides"), np.dtype(interface["typestr"]).itemsize
    return int(address), math.prod(shape) * item_bytes if strides is None else _span_bytes(shape, strides, item_bytes), None


def _span_bytes(shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in shape:
        return 0
    if any(stride < 0 for stride in strides_bytes):
        raise InvalidRequest(f"the array has the strides {tuple(strides_bytes)} (bytes); none may be negative")
    return sum((count - 1) * stride for count, stride in zip(shape, strides_bytes, strict=True)) + item_bytes


# ---- what it is ----


@dataclass(frozen=True, slots=True)
class _Pointer:
    """What the driver knows of an address."""

    context: int
    memory_type: int
    managed: bool
    device: int
    #: Whether cuIpcGetMemHandle takes it: cudaMalloc memory of this process.
    ipc_capable: bool
    #: CUmemAllocationHandleType bits.
    handle_types: int
    pool: int


def _look_up(driver: Any, address: int) -> _Pointer:
    kinds = driver.CUpointer_attribute
    attributes = [
        kinds.CU_POINTER_ATTRIBUTE_CONTEXT,
        kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        kinds.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
    ]
    # It succeeds for addresses that CUDA does not know, and gives zeros.
    values = checked(driver.cuPointerGetAttributes(len(attributes), attributes, address), f"address {address:#x} can't be looked up")
    context, memory_type, managed, device, ipc_capable, handle_types, pool = map(int, values)
    return _Pointer(context, memory_type, bool(managed), device, bool(ipc_capable), handle_types, pool)


def _refuse_foreign(pointer: _Pointer, address: int) -> None:
    """Raises InvalidRequest for all that is no device memory of cudaMalloc or virtual memory management."""
    # CUmemorytype: 0 if CUDA does not know it, 1 host, 2 device.
    if pointer.managed:
        raise InvalidRequest(f"address {address:#x} is managed memory (cudaMallocManaged), which no other process can open; use cudaMalloc memory")
    if pointer.memory_type == 1:
        raise InvalidRequest(f"address {address:#x} is page-locked host memory, no GPU memory; share host memory with HostMemory")
    if pointer.memory_type != 2:
        raise InvalidRequest(f"address {address:#x} is no memory that CUDA allocated in this process")
    if pointer.pool:
        raise InvalidRequest(
            f"address {address:#x} is from a memory pool (cudaMallocAsync), whose allocations can't be handed over; set "
            "PYTORCH_CUDA_ALLOC_CONF=backend:native, or in CuPy cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)"
        )


# ---- exporting ----


def _export(address: int, size_bytes: int, device: int | None, owner: object) -> DeviceMemory:
    if size_bytes < 1 or not 0 < address <= (1 << 64) - size_bytes:
        raise InvalidRequest(f"{size_bytes} bytes at address {address:#x} are no memory to export; at least 1 byte is needed, within 64 bits")
    driver = load_driver()
    pointer = _look_up(driver, address)
    _refuse_foreign(pointer, address)
    if device is not None and device != pointer.device:
        raise InvalidRequest(f"address {address:#x} is on device {pointer.device}; device {device} was named")
    # Memory of virtual memory management belongs to no context.
    context = Context(driver, driver.CUcontext(pointer.context)) if pointer.context else Context.open(driver, pointer.device)
    try:
        with context.current():
            name = f"GPU-{uuid.UUID(bytes=checked(driver.cuDeviceGetUuid(pointer.device), 'the device has no UUID').bytes)}"
            if not pointer.ipc_capable:
                base, chunks = _export_chunks(driver, address, size_bytes, pointer.device)
                return DeviceMemory(name, size_bytes, address - base, sum(chunk.chunk_bytes for chunk in chunks), b"", chunks, owner)
            base, allocation_bytes = _allocation(driver, address)
            if address + size_bytes > base + allocation_bytes:
                raise InvalidRequest(f"{size_bytes} bytes at byte {address - base} do not lie in one allocation; that has {allocation_bytes} bytes")
            handle = handle_bytes(checked(driver.cuIpcGetMemHandle(base), f"the allocation at {base:#x} can't be exported"))
            return DeviceMemory(name, size_bytes, address - base, allocation_bytes, handle, (), owner)
    finally:
        context.release()


def _allocation(driver: Any, address: int) -> tuple[int, int]:
    """Base and bytes of the allocation, or of the physical chunk that is mapped there."""
    base, size_bytes = checked(driver.cuMemGetAddressRange(address), f"address {address:#x} lies in no allocation")
    return int(base), int(size_bytes)


def _export_chunks(driver: Any, address: int, size_bytes: int, device: int) -> tuple[int, tuple[Chunk, ...]]:
    """The first chunk's address, and all chunks that the range touches."""
    chunks: list[Chunk] = []
    first = at = address
    try:
        while at < address + size_bytes:
            if len(chunks) == CHUNKS_MAX:
                raise InvalidRequest(
                    f"{size_bytes} bytes lie in more than {CHUNKS_MAX} physical chunks (the last has {chunks[-1].chunk_bytes} bytes), the most that can "
                    f"be handed over at once; {_SEGMENTS_HINT}"
                )
            pointer = _look_up(driver, at)
            if chunks and (pointer.memory_type, pointer.device) != (2, device):
                raise InvalidRequest(f"only {at - address} of {size_bytes} bytes from address {address:#x} on are mapped on device {device}")
            base, chunk_bytes = _allocation(driver, at)
            chunks.append(Chunk(_export_chunk(driver, at, pointer.handle_types), chunk_bytes))
            if len(chunks) == 1:
                first = base
            at = base + chunk_bytes
        return first, tuple(chunks)
    except BaseException:
        _close_all([chunk.fd for chunk in chunks])
        raise


def _export_chunk(driver: Any, address: int, handle_types: int) -> int:
    """A descriptor of the physical chunk mapped at `address`, whole: chunks are always mapped from their first byte on."""
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    error, handle = driver.cuMemRetainAllocationHandle(address)
    if int(error):
        raise InvalidRequest(
            f"address {address:#x} is neither cudaMalloc memory of this process nor virtual memory management ({error.name}); {_SEGMENTS_HINT}"
        )
    try:
        if not handle_types & int(kind):
            raise InvalidRequest(
                f"the virtual memory at {address:#x} (cuMemCreate) was not made for POSIX descriptors (its handle types are {handle_types:#x}, "
                f"{int(kind):#x} is needed) and can't leave the process; {_SEGMENTS_HINT}"
            )
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fd = int(checked(driver.cuMemExportToShareableHandle(handle, kind, 0), f"no descriptor of the chunk at {address:#x} (this process may open {most})"))
    finally:
        driver.cuMemRelease(handle)
    # The engine's own children must not keep GPU memory.
    os.set_inheritable(fd, False)
    return fd


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
