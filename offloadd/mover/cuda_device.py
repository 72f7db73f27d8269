"""The mover of a GPU: regions in CUDA memory of engines, copied by the copy engines or by kernels (`copy_choice`).

Paths `bounce` and `ddr`: the pipeline is the host's, with slots staged, and the arena, in page-locked host memory. Path `gds`: slots are staged on the GPU
itself (`gds_bench`, `gds_work`). Imported by every mover; it loads CUDA only when a device is opened.
"""

import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from offloadd.cuda.closing import close_all
from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.flags import FlagReader
from offloadd.cuda.imports import IpcImports, IpcMemory, VmmChunk, VmmMemory
from offloadd.cuda.locked_chunks import LockedChunks, Part
from offloadd.cuda.memory import DeviceMemory, HostRegistration, random_memory
from offloadd.cuda.nvml import read_memory_use
from offloadd.cuda.region import CudaRegion, MemoryPart, Places
from offloadd.cuda.streams import Stream
from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import Bytes, Mapping, map_private
from offloadd.model.device_event import EventName
from offloadd.model.region import Layout
from offloadd.mover.arena import Arena
from offloadd.mover.copy_choice import CopyChoice, Mode
from offloadd.mover.cuda_events import RegionEvents
from offloadd.mover.device import Bench, make_all
from offloadd.mover.messages import ArenaLocked, ChunkPiece, CopiesChosen, GpuFacts, KernelsFailed, OwnPiece, Piece
from offloadd.mover.pageable import Through, gather_through, scatter_through
from offloadd.mover.volume import Volume
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.gather import Checks, Payloads
from offloadd.units import MIB

if TYPE_CHECKING:
    from offloadd.cuda.gds_setup import Gds, GdsUnavailable
    from offloadd.transfer.kernels.base import DeviceKernels

Indices = npt.NDArray[Any]
#: `CopyEngines.gather` or `CopyEngines.scatter`.
Queue = Callable[..., None]

#: What the front is told without having asked.
Told = ArenaLocked | CopiesChosen | KernelsFailed

#: A copy of a slice takes milliseconds. One that takes this long will not end, and only the end of the process makes the driver let go of engine memory.
COPY_TIMEOUT_S = 20.0
#: KvikIO has one pool for all volumes, and an I/O holds a thread of it until it ends.
GDS_THREADS = 256
#: Page-locked memory of a thread that reads engine memory to compare it.
SCRATCH_BYTES = MIB


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

    def __init__(self, device: "CudaDevice", region: CudaRegion, memories: Sequence[IpcMemory | VmmMemory | DeviceMemory]) -> None:
        self._device = device
        self._region = region
        self._copies = device.choice.of(region)
        self._memories = memories
        self.payload_bytes = region.payload_bytes
        #: The CPU sees the bytes only after they have been copied out.
        self.checks = False
        self._events = RegionEvents(device.flags, device.imports)

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """See `MappedRegion`."""
        self._copy(self._copies.gather, gather_through, block_indices, target, first, last)

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """See `MappedRegion`."""
        self._copy(self._copies.scatter, scatter_through, block_indices, source, first, last)

    def _copy(self, queue: Queue, through: Through, block_indices: Indices, ours: Payloads, first: int, last: int | None) -> None:
        """Copy directly where the GPU reaches our memory, else through memory that it does reach."""
        end = self.payload_bytes if last is None else last
        parts = self._device.parts(ours, end - first)
        at_once = len(parts) == 1 and parts[0][1]
        if not at_once and block_indices.size and int(block_indices.max()) >= self._region.block_count:
            # Where all is copied at once, the plan of the copies refuses it before any byte moves.
            raise ValueError(f"block index {int(block_indices.max())} is outside the region of {self._region.block_count} blocks")

        def copy(indices: Indices, places: Payloads, begin: int, stop: int) -> None:
            with self._device.copying() as stream:
                queue(indices, _places(places), stream, first=begin, last=stop)

        for mine, reached in parts:
            places = Payloads(ours.buffer, ours.offsets[mine], ours.stride_bytes)
            if reached:
                copy(block_indices[mine], places, first, end)
            else:
                through(self._device.scratch(), copy, block_indices[mine], places, first, end)

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """See `MappedRegion`. Copied out to be read: the host can't look into memory of a GPU. Always by the copy engines: a second opinion of kernels."""
        end = self.payload_bytes if last is None else last
        ours = self._device.scratch()
        value = 0
        for begin in range(first, end, SCRATCH_BYTES):
            stop = min(end, begin + SCRATCH_BYTES)
            places = _places(Payloads(ours, np.zeros(1, dtype=np.int64), SCRATCH_BYTES))
            with self._device.copying() as stream:
                self._device.engines.gather(self._region, np.array([block_index], dtype=np.uint32), places, stream, first=begin, last=stop)
            value = crc32c(ours[: stop - begin], value)
        return value

    def gather_to(self, block_indices: Indices, target: Places) -> None:
        """As `gather` of whole payloads, to memory of the GPU."""
        with self._device.copying() as stream:
            self._copies.gather(block_indices, target, stream)

    def scatter_from(self, block_indices: Indices, source: Places) -> None:
        """As `scatter` of whole payloads, from memory of the GPU."""
        with self._device.copying() as stream:
            self._copies.scatter(block_indices, source, stream)

    def has_come(self, after_event: EventName) -> bool:
        """See `MappedRegion`."""
        return self._events.has_come(after_event)

    def close(self) -> None:
        """See `MappedRegion`."""
        close_all([self._events, *self._memories])


def _places(payloads: Payloads) -> Places:
    return Places(payloads.buffer.ctypes.data, payloads.buffer.nbytes, payloads.offsets, payloads.stride_bytes, on_device=False)


class _Copying:
    """The thread's stream; what was queued on it is over at the end of the `with` block, or the process is."""

    def __init__(self, stream: Stream, lost: Callable[[str], NoReturn]) -> None:
        self._stream = stream
        self._lost = lost

    def __enter__(self) -> Stream:
        return self._stream

    def __exit__(self, *_: object) -> None:
        try:
            self._stream.synchronize(COPY_TIMEOUT_S)
        except TimeoutError as error:
            self._lost(str(error))
        except CudaError as error:
            # A context in which work failed is lost for good.
            self._lost(f"copies failed: {error}")


class CudaDevice:
    """One GPU, by `cuda:N` or UUID. Raises CudaError when it can't be used."""

    paths = ("bounce", "ddr", "gds")
    copies_by = ""

    def __init__(self, selector: str, *, copies: Mode = "engines", tell: Callable[[Told], None] = lambda _: None) -> None:
        """`copies`: see `CopyChoice`. `tell`: the front, from any thread."""
        uuid = Device.uuid_of(selector)
        before = read_memory_use(uuid)
        self.device = Device.open(selector)
        self.uuid = self.device.uuid
        self.facts = GpuFacts(
            name=self.device.name,
            pci_bus_id=self.device.pci_bus_id,
            compute_mode=self.device.compute_mode.name,
            uses_mps=self.device.uses_mps,
            context_bytes=read_memory_use(uuid).grown_by(os.getpid(), before),
        )
        self.engines = CopyEngines.of(self.device)
        self.choice = CopyChoice(device=self.device, engines=self.engines, mode=copies, open_kernels=self.kernels, copying=self.copying, tell=tell)
        self._kernels_lock = threading.Lock()
        self._kernels: DeviceKernels | CudaError | None = None
        self.imports = IpcImports(self.device)
        self.flags = FlagReader(self.device)
        self._local = threading.local()
        self._gds_lock = threading.Lock()
        #: Held while a volume is probed.
        self.probing = threading.Lock()
        self._gds: tuple[Gds, DeviceKernels] | GdsUnavailable | None = None
        self._arena: LockedChunks | None = None
        self._tell = tell

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int], pieces: Sequence[Piece]) -> CudaMappedRegion:
        """See `MoverDevice`: memory by CUDA IPC handles and in chunks. Every plane is checked against what the driver says that the allocation has."""
        if len(pieces) != len(memory_bytes):
            raise InvalidRequest(f"the region names {len(memory_bytes)} memories on {self.uuid}; {len(pieces)} came")
        chunk_count = sum(len(piece.chunk_bytes) for piece in pieces if isinstance(piece, ChunkPiece))
        if len(fds) != chunk_count:
            # The kernel drops descriptors that a process may not open.
            raise InvalidRequest(
                f"the region's memories have {chunk_count} chunks on {self.uuid}; {len(fds)} descriptors came "
                f"(its mover may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
            )
        memories: list[IpcMemory | VmmMemory | DeviceMemory] = []
        left = iter(fds)
        try:
            parts = []
            for piece, size_bytes in zip(pieces, memory_bytes, strict=True):
                if isinstance(piece, ChunkPiece):
                    # A mapping for each region: addresses are all that a second one takes.
                    memories.append(VmmMemory.open(self.device, [VmmChunk(next(left), chunk_bytes) for chunk_bytes in piece.chunk_bytes]))
                elif isinstance(piece, OwnPiece):
                    memories.append(random_memory(self.device, size_bytes))
                else:
                    memories.append(self.imports.open(piece.handle))
                parts.append(MemoryPart.of(memories[-1], 0 if isinstance(piece, OwnPiece) else piece.offset_bytes, size_bytes))
            region = CudaRegion.over(layout, parts, planes_max=max(1, len(layout.planes)))
            return CudaMappedRegion(self, region, memories)
        except BaseException:
            close_all(memories)
            raise

    def benches(self, path: str, volume: Volume, count: int, size_bytes: int) -> Sequence[Bench]:
        """See `MoverDevice`."""
        if path == "gds":
            from offloadd.mover.gds_bench import open_gds_benches

            return open_gds_benches(self, volume, count, size_bytes)
        return self._pinned(count, size_bytes)

    def _pinned(self, count: int, size_bytes: int) -> list[PinnedBench]:
        def make() -> PinnedBench:
            mapping = map_private(size_bytes)
            try:
                return PinnedBench(mapping, HostRegistration.register(self.device, mapping.bytes.ctypes.data, mapping.bytes.nbytes))
            except BaseException:
                mapping.close()
                raise

        return make_all(count, make)

    @property
    def numa_node(self) -> int:
        """See `MoverDevice`."""
        return self.device.numa_node

    def adopt_arena(self, arena: Arena, memory_node: int) -> None:
        """See `MoverDevice`: page-locked in the background, a second for some GiB, the chunks on our node first.

        Copies to and from a chunk that is not page-locked (yet, or for good where the system refuses) take a way around: see `pageable`.
        """
        chunks = self._arena = LockedChunks(self.device, arena.bytes.ctypes.data, [chunk.size_bytes for chunk in arena.chunks])
        order = sorted(range(len(arena.chunks)), key=lambda number: arena.chunks[number].node != memory_node)

        def lock() -> None:
            why = ""
            try:
                chunks.lock(order)
            except CudaError as error:
                why = str(error)
            self._tell(ArenaLocked(locked_bytes=chunks.locked_bytes, arena_bytes=chunks.size_bytes, why=why))

        threading.Thread(target=lock, name="arena-lock", daemon=True).start()

    def parts(self, payloads: Payloads, size_bytes: int) -> list[Part]:
        """Payloads of `size_bytes` each, in groups whose copies are made together: all, unless they lie in several chunks of the arena. See `LockedChunks`."""
        arena = self._arena
        if arena is None or not arena.holds(payloads.buffer.ctypes.data):
            return [(slice(None), True)]
        return arena.parts(payloads.offsets, size_bytes)

    def enter_thread(self, path: str) -> None:
        """See `MoverDevice`."""
        self.device.make_current()

    def scratch(self) -> Bytes:
        """SCRATCH_BYTES of page-locked memory of the calling thread's."""
        bench: Bench | None = getattr(self._local, "scratch", None)
        if bench is None:
            bench = self._local.scratch = self._make_scratch()
        return bench.bytes

    def kernels(self) -> "DeviceKernels":
        """The kernels, compiled at the first call, which takes some seconds where CuPy has not kept them. Raises CudaError, each time the same."""
        from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels

        with self._kernels_lock:
            if self._kernels is None:
                try:
                    self._kernels = open_cupy_kernels(self.device.ordinal)
                except CudaError as error:
                    self._kernels = error
        if isinstance(self._kernels, CudaError):
            raise self._kernels
        return self._kernels

    def _make_scratch(self) -> Bench:
        try:
            (bench,) = self._pinned(1, SCRATCH_BYTES)
            return bench
        except CudaError:
            # Copies of memory that is never page-locked pass through buffers of the driver's: slower, and as right.
            return map_private(SCRATCH_BYTES)

    def gds(self, slice_bytes: int) -> "tuple[Gds, DeviceKernels]":
        """cuFile and the kernels, set up at the first call. Raises GdsUnavailable, each time the same."""
        with self._gds_lock:
            if self._gds is None:
                self._gds = self._open_gds(slice_bytes)
        if isinstance(self._gds, Exception):
            raise self._gds
        return self._gds

    def _open_gds(self, slice_bytes: int) -> "tuple[Gds, DeviceKernels] | GdsUnavailable":
        from offloadd.cuda.gds_setup import GdsUnavailable, WhyNot, configure

        try:
            kernels = self.kernels()
        except CudaError as error:
            return GdsUnavailable(WhyNot.CUDA, f"{error}; checksums on the GPU need them")
        try:
            return configure(self.device, task_bytes=slice_bytes, threads=GDS_THREADS), kernels
        except GdsUnavailable as error:
            return error

    def copying(self) -> _Copying:
        """For a `with` block that queues copies on the calling thread's stream."""
        return _Copying(self._stream(), self._lost)

    def _lost(self, why: str) -> NoReturn:
        try:
            self.choice.blame(why)
        finally:
            _end_process(why)

    def _stream(self) -> Stream:
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = Stream.create(self.device)
        return stream
