"""The mover of a GPU: regions in CUDA memory of engines, copied by the copy engines to and from page-locked host memory.

The pipeline around it is the host's: slots are staged in host memory, checked there, and read and written with O_DIRECT (path `bounce`); the arena is
page-locked and copied directly (path `ddr`). Imported only in a GPU's mover.
"""

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.imports import IpcImports, IpcMemory
from offloadd.cuda.memory import HostRegistration
from offloadd.cuda.region import CudaRegion, MemoryPart, Places
from offloadd.cuda.streams import Event, Stream
from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import Bytes, Mapping, map_private
from offloadd.model.region import Layout
from offloadd.mover.arena import Arena
from offloadd.mover.device import make_all
from offloadd.mover.messages import IpcPiece
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.gather import Payloads

Indices = npt.NDArray[Any]

#: A copy of a slice takes milliseconds. One that takes this long will not end, and only the end of the process makes the driver let go of engine memory.
COPY_TIMEOUT_S = 20.0
#: Events that one region holds open. An engine uses a few again and again.
EVENTS_MAX = 64


def _end_process(why: str) -> NoReturn:
    """The driver stops all copies of a process that ends; nothing else proves that none touches engine memory any more. The front starts another mover."""
    print(f"mover: {why}; ending, so that the driver lets go of all memory", file=sys.stderr, flush=True)
    os._exit(1)


class PinnedBench:
    """Host memory that the GPU reaches by DMA."""

    def __init__(self, mapping: Mapping, registration: HostRegistration) -> None:
        self._mapping = mapping
        self._registration = registration

    @property
    def bytes(self) -> Bytes:
        """All of it, as uint8."""
        return self._mapping.bytes

    def close(self) -> None:
        """Unregister and unmap, in this order: memory that is unmapped first stays known to the driver."""
        self._registration.close()
        self._mapping.close()


class CudaMappedRegion:
    """A region in CUDA memory of an engine. Copies go by the calling thread's stream and have ended when a method returns."""

    def __init__(self, device: "CudaDevice", region: CudaRegion, memories: list[IpcMemory]) -> None:
        self._device = device
        self._region = region
        self._memories = memories
        self.payload_bytes = region.payload_bytes
        self._lock = threading.Lock()
        #: By handle, the latest used last. They go with the region: a handle says nothing about another engine's event.
        self._events: OrderedDict[bytes, Event] = OrderedDict()

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None) -> None:
        """See `MappedRegion`."""
        with self._device.copying() as stream:
            self._device.engines.gather(self._region, block_indices, _places(target), stream, first=first, last=last)

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None) -> None:
        """See `MappedRegion`."""
        with self._device.copying() as stream:
            self._device.engines.scatter(self._region, block_indices, _places(source), stream, first=first, last=last)

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """See `MappedRegion`. Copied out to be read: the host can't look into memory of a GPU."""
        end = self.payload_bytes if last is None else last
        ours = np.empty(end - first, dtype=np.uint8)
        self.gather(np.array([block_index], dtype=np.uint32), Payloads(ours, np.zeros(1, dtype=np.int64), ours.size), first, last)
        return crc32c(ours)

    def has_come(self, after_event: bytes) -> bool:
        """See `MappedRegion`."""
        with self._lock:
            event = self._events.get(after_event)
            if event is None:
                event = self._events[after_event] = self._device.open_event(after_event)
                if len(self._events) > EVENTS_MAX:
                    _, oldest = self._events.popitem(last=False)
                    oldest.close()
            self._events.move_to_end(after_event)
            return event.is_done()

    def close(self) -> None:
        """See `MappedRegion`."""
        for event in self._events.values():
            event.close()
        for memory in self._memories:
            memory.close()


def _places(payloads: Payloads) -> Places:
    return Places(payloads.buffer.ctypes.data, payloads.buffer.nbytes, payloads.offsets, payloads.stride_bytes, on_device=False)


class _Copying:
    """The thread's stream; what was queued on it is over at the end of the `with` block, or the process is."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> Stream:
        return self._stream

    def __exit__(self, *_: object) -> None:
        try:
            self._stream.synchronize(COPY_TIMEOUT_S)
        except TimeoutError as error:
            _end_process(str(error))
        except CudaError as error:
            # A context in which work failed is lost for good.
            _end_process(f"copies failed: {error}")


class CudaDevice:
    """One GPU, by `cuda:N` or UUID. Raises CudaError when it can't be used."""

    paths = ("bounce", "ddr")

    def __init__(self, selector: str) -> None:
        self._device = Device.open(selector)
        self.uuid = self._device.uuid
        self.engines = CopyEngines.of(self._device)
        self._imports = IpcImports(self._device)
        self._local = threading.local()
        #: Registrations that last as long as the process.
        self._arena: HostRegistration | None = None

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int], pieces: Sequence[IpcPiece]) -> CudaMappedRegion:
        """See `MoverDevice`: memory by CUDA IPC handles. Every plane is checked against what the driver says that the allocation has."""
        if fds or len(pieces) != len(memory_bytes):
            raise InvalidRequest(f"a region on {self.uuid} is CUDA memory by IPC handle: {len(pieces)} handles and {len(fds)} descriptors came")
        memories: list[IpcMemory] = []
        try:
            parts = []
            for piece, size_bytes in zip(pieces, memory_bytes, strict=True):
                memories.append(self._imports.open(piece.handle))
                parts.append(MemoryPart.of(memories[-1], piece.offset_bytes, size_bytes))
            region = CudaRegion.over(layout, parts, planes_max=max(1, len(layout.planes)))
            return CudaMappedRegion(self, region, memories)
        except BaseException:
            for memory in memories:
                memory.close()
            raise

    def benches(self, path: str, count: int, size_bytes: int) -> Sequence[PinnedBench]:
        """See `MoverDevice`."""
        if path == "gds":
            raise CudaError("go by gds", "", "this version does not have it yet")

        def make() -> PinnedBench:
            mapping = map_private(size_bytes)
            try:
                return PinnedBench(mapping, HostRegistration.register(self._device, mapping.bytes.ctypes.data, mapping.bytes.nbytes))
            except BaseException:
                mapping.close()
                raise

        return make_all(count, make)

    def adopt_arena(self, arena: Arena) -> None:
        """See `MoverDevice`: page-locked in the background. Until then, and if the system refuses, copies go through buffers of the driver's."""

        def register() -> None:
            try:
                self._arena = HostRegistration.register(self._device, arena.bytes.ctypes.data, arena.bytes.nbytes)
            except CudaError as error:
                print(f"mover: the arena is not page-locked, copies to it are slower: {error}", file=sys.stderr, flush=True)

        threading.Thread(target=register, name="arena-register", daemon=True).start()

    def enter_thread(self) -> None:
        """See `MoverDevice`."""
        self._device.make_current()

    def copying(self) -> _Copying:
        """For a `with` block that queues copies on the calling thread's stream."""
        return _Copying(self._stream())

    def open_event(self, handle: bytes) -> Event:
        """An engine's event. Raises InvalidRequest or CudaError for a handle that can't be opened."""
        return Event.open(self._device, handle)

    def _stream(self) -> Stream:
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = Stream.create(self._device)
        return stream
