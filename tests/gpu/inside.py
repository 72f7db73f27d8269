"""Runs inside an engine's process, which has the prelude of `tests/standin_tests/child.py`: KV memory on a GPU, filled and compared by name."""

import hashlib
import os
import threading

import numpy as np
from cuda.bindings import driver as cu

from offloadd.client import AckLevel, Blocks, Client, Namespace, Path, Plane, Tier
from offloadd.client.cuda import Chunk, DeviceMemory, FlagValue, export_pointer, new_event, new_flag
from offloadd.errors import OffloaddError

#: The memories begin inside their allocations, as a caching allocator's tensors do.
INSIDE_BYTES = 512


def ok(answer):
    error, *values = answer
    assert not int(error), error.name
    return values[0] if len(values) == 1 else tuple(values)


def virtual_memory(chunk_bytes):
    """Address of chunks of virtual memory management, mapped side by side as an allocator with expandable segments does."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(ok(cu.cuCtxGetDevice()))
    properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    base = at = int(ok(cu.cuMemAddressReserve(sum(chunk_bytes), 0, 0, 0)))
    for size in chunk_bytes:
        handle = ok(cu.cuMemCreate(size, properties, 0))
        ok(cu.cuMemMap(at, size, 0, handle, 0))
        ok(cu.cuMemRelease(handle))
        at += size
    access = cu.CUmemAccessDesc()
    access.location = properties.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(base, sum(chunk_bytes), [access], 1))
    return base


def in_chunks(memory, **changes):
    """A memory of its own with descriptors of the same chunks, or with other `fds`, `sizes`, ...: what a client that errs could hand over."""
    fds, sizes = changes.pop("fds", memory.fds), changes.pop("sizes", [chunk.chunk_bytes for chunk in memory.chunks])
    chunks = tuple(Chunk(os.dup(fd), size) for fd, size in zip(fds, sizes, strict=True))
    values = {name: getattr(memory, name) for name in ("device_uuid", "memory_bytes", "offset_bytes", "allocation_bytes")} | changes
    return DeviceMemory(**values, ipc_handle=b"", chunks=chunks, _owner=None)


class GpuEngine:
    """One region on the GPU of the calling thread's context, and a client. `planes`: (memory, offset, stride, bytes).

    `chunk_bytes`: the chunks of each memory, which then begins `inside_bytes` behind the first one's beginning; without, memories come from cudaMalloc.
    `filled` False leaves memory untouched: a stand-in's takes no room then.
    """

    def __init__(
        self, runtime_dir, *, block_count, memory_bytes, planes, chunk_bytes=(), inside_bytes=INSIDE_BYTES, filled=True, instance="engine", weights="commit-1"
    ):
        self.planes = [Plane(*plane) for plane in planes]
        self.block_count = block_count
        self.memory_bytes = memory_bytes
        self.inside_bytes = inside_bytes
        self.allocation_bytes = [sum(sizes) for sizes in chunk_bytes] or [inside_bytes + size for size in memory_bytes]
        self.allocations = [virtual_memory(sizes) for sizes in chunk_bytes] or [int(ok(cu.cuMemAlloc(size))) for size in self.allocation_bytes]
        self.pointers = [allocation + inside_bytes for allocation in self.allocations]
        self.memories = [export_pointer(pointer, size) for pointer, size in zip(self.pointers, memory_bytes, strict=True)]
        if filled:
            for pointer, size in zip(self.allocations, self.allocation_bytes, strict=True):
                ok(cu.cuMemsetD8(pointer, 0xEE, size))
        self.client = Client.connect(runtime_dir, instance=instance, timeout_s=60)
        self.namespace = Namespace(model="test", weights=weights, engine="test")
        self.register()

    def register(self):
        self.region = self.client.register_region(block_count=self.block_count, planes=self.planes, memories=self.memories, namespace=self.namespace)

    def expected(self, name):
        size = sum(plane.block_bytes for plane in self.planes)
        return np.random.default_rng(list(name.encode())).integers(0, 256, size, dtype=np.uint8).tobytes()

    def write(self, index, name):
        data, at = self.expected(name), 0
        for plane in self.planes:
            address = self.pointers[plane.memory] + plane.offset_bytes + index * plane.block_stride_bytes
            piece = np.frombuffer(data[at : at + plane.block_bytes], dtype=np.uint8).copy()
            ok(cu.cuMemcpyHtoD(address, piece.ctypes.data, piece.size))
            at += plane.block_bytes

    def read(self, index):
        parts = []
        for plane in self.planes:
            address = self.pointers[plane.memory] + plane.offset_bytes + index * plane.block_stride_bytes
            piece = np.empty(plane.block_bytes, dtype=np.uint8)
            ok(cu.cuMemcpyDtoH(piece.ctypes.data, address, piece.size))
            parts.append(piece.tobytes())
        return b"".join(parts)

    def wrong(self, indices, names):
        """Indices whose bytes are not those of their names."""
        return [index for index, name in zip(indices, names, strict=True) if self.read(index) != self.expected(name)]

    def digest(self):
        """Of all bytes of all allocations: nothing outside the blocks may change."""
        digest = hashlib.sha256()
        for index in range(self.block_count):
            digest.update(self.read(index))
        return digest.hexdigest()

    def margins(self):
        """Whether the bytes before and behind each memory, in its allocation, are untouched."""
        untouched = True
        for allocation, whole, size in zip(self.allocations, self.allocation_bytes, self.memory_bytes, strict=True):
            data = np.empty(whole, dtype=np.uint8)
            ok(cu.cuMemcpyDtoH(data.ctypes.data, allocation, data.size))
            untouched &= bool((data[: self.inside_bytes] == 0xEE).all() and (data[self.inside_bytes + size :] == 0xEE).all())
        return untouched

    def blocks(self, indices, names):
        return Blocks(self.region, list(indices), [hashlib.sha256(name.encode()).digest() for name in names])

    def evict(self, indices, names, *, tier="ANY", path="AUTO", durable=False, **options):
        ack = AckLevel.DURABLE if durable else AckLevel.COPIED
        return told(self.client.evict(self.blocks(indices, names), tier=Tier[tier], path=Path[path], ack=ack, **options))

    def restore(self, indices, names, *, path="AUTO", **options):
        return told(self.client.restore(self.blocks(indices, names), path=Path[path], **options))

    def queue(self, stream, indices, name):
        """Queue copies into blocks: they get the bytes of `name` when the stream comes to it."""
        data = np.frombuffer(self.expected(name), dtype=np.uint8).copy()
        for index in indices:
            at = 0
            for plane in self.planes:
                address = self.pointers[plane.memory] + plane.offset_bytes + index * plane.block_stride_bytes
                ok(cu.cuMemcpyHtoDAsync(address, data.ctypes.data + at, plane.block_bytes, stream))
                at += plane.block_bytes

    def try_region(self, memories, **changes):
        """What `register_region` said: the error, or None."""
        shape = {"block_count": self.block_count, "planes": self.planes, "namespace": self.namespace, **changes}
        try:
            self.client.register_region(memories=memories, **shape)
        except OffloaddError as error:
            return [type(error).__name__, str(error)]


class Request:
    """A call that a thread makes, so that the process can be asked meanwhile."""

    def __init__(self, call):
        self.answer = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.answer = self._call()
        except OffloaddError as error:
            self.answer = {"error": [type(error).__name__, str(error)]}

    def finish(self):
        self._thread.join()
        return self.answer


def stream_and_event():
    return ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)), new_event()


class Mark:
    """What requests wait for: an event, or a flag. `name` is what they are given."""

    def __init__(self, kind):
        self.kind = kind
        self._made = {"event": new_event, "flag": new_flag}[kind]()
        self.name = b""

    def record(self, stream):
        if self.kind == "event":
            self._made.record(stream)
            self.name = self._made.handle
        else:
            self.name = self._made.write(stream)


def stream_and_mark(kind):
    return ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)), Mark(kind)


def flag_value(handle, offset_bytes, value):
    """As a client of its own could name it; `handle` in hexadecimal."""
    return FlagValue(bytes.fromhex(handle), offset_bytes, value)


def told(result):
    return {
        "outcomes": [[outcome.status.name, outcome.reason.name, outcome.tier.name] for outcome in result.outcomes],
        "paths": [[use.tier.name, use.path.name, use.block_count] for use in result.paths],
        "ways": {use.way.label: use.block_count for use in result.paths},
    }
