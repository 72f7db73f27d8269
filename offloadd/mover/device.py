"""What a mover needs of the device that its regions lie in, and the host's answer to it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import MADV_HUGEPAGE, Bytes, Mapping, map_memories, map_private
from offloadd.memory.memfd import validate_sealed
from offloadd.memory.planes import plane_views
from offloadd.memory.topology import UNKNOWN_NODE
from offloadd.model.device_event import EventName
from offloadd.model.region import Layout, validate_layout
from offloadd.mover.arena import Arena
from offloadd.mover.messages import GpuFacts, Piece
from offloadd.mover.volume import Volume
from offloadd.transfer.gather import Checks, Payloads, Views, block_crc, gather, payload_bytes, scatter
from offloadd.transfer.native import Library

Indices = npt.NDArray[Any]


class EventNotOpenedError(Exception):
    """What a job should wait for can't be opened; the text says why and what to do."""


class MappedRegion(Protocol):
    """An engine's memory, mapped. Copies have ended when a method returns; all raise ValueError, before any byte moves, for a block that it does not have."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def checks(self) -> bool:
        """Whether copies can take checksums on the way, which reads the bytes once for both."""

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """Copy payload bytes `first` to `last` (None: all) of each block to its place in memory of ours. `checks`: only if the region can."""

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """Copy payload bytes `first` to `last` (None: all) of each block from its place in memory of ours. `checks`: only if the region can."""

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """CRC32C of payload bytes `first` to `last` (None: all) of one block, as they are in engine memory."""

    def has_come(self, after_event: EventName) -> bool:
        """Whether the engine's event or flag has come; never waits for it. Raises EventNotOpenedError, ValueError or OSError if it can't be told."""

    def close(self) -> None:
        """Unmap."""


class Bench(Protocol):
    """What one thread of a lane works with."""

    @property
    def bytes(self) -> Bytes:
        """Memory of the host that slots are staged in, as uint8."""

    def close(self) -> None:
        """Give it back. No copy may use it any more."""


class MoverDevice(Protocol):
    """One device. `paths`: names of the ways that its mover has. All methods may be called from any thread."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Path names, for `Hello`."""

    @property
    def uuid(self) -> str:
        """Of a GPU, as nvidia-smi prints it; empty for the host."""

    @property
    def facts(self) -> GpuFacts | None:
        """Of a GPU, for `Hello`."""

    @property
    def copies_by(self) -> str:
        """What copies between memories of the host go by, for people; empty for a GPU."""

    @property
    def numa_node(self) -> int:
        """The NUMA node that a GPU sits on, -1 if that is not known; -1 for the host."""

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int], pieces: Sequence[Piece]) -> MappedRegion:
        """Map memories, handed over by descriptor (which stay the caller's to close) or by CUDA IPC handle.

        Raises InvalidRequest, OSError or ValueError; nothing is mapped then.
        """

    def benches(self, path: str, volume: Volume, count: int, size_bytes: int) -> Sequence[Bench]:
        """For the threads of a lane that goes this way to `volume`, with staging slots of `size_bytes`. Raises OSError; nothing is held then."""

    def adopt_arena(self, arena: Arena, memory_node: int) -> None:
        """The arena was mapped: prepare it for this device's copies, in the background if that takes long; what lies on `memory_node` first."""

    def enter_thread(self, path: str) -> None:
        """The calling thread will serve a lane that goes this way; returns when it can."""


Made = TypeVar("Made", bound=Bench)


def make_all(count: int, make: Callable[[], Made]) -> list[Made]:
    """So many benches, or none and the error."""
    made: list[Made] = []
    try:
        for _ in range(count):
            made.append(make())
    except BaseException:
        for bench in made:
            bench.close()
        raise
    return made


class HostRegion:
    """A region in memfds: views [plane, block, byte] in payload order over one mapping. Copied by `native`, by NumPy without it."""

    def __init__(self, mapping: Mapping, views: Views, native: Library | None = None) -> None:
        self._mapping = mapping
        self._views = views
        self._pieces = native.pieces(views) if native else None
        self.checks = self._pieces is not None
        self.payload_bytes = payload_bytes(views)

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """See `MappedRegion`."""
        if self._pieces is not None:
            self._pieces.gather(block_indices, target, first, last, checks)
        else:
            gather(self._views, block_indices, target, first, last)

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """See `MappedRegion`."""
        if self._pieces is not None:
            self._pieces.scatter(block_indices, source, first, last, checks)
        else:
            scatter(self._views, block_indices, source, first, last)

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """See `MappedRegion`."""
        return block_crc(self._views, block_index, first, last)

    def has_come(self, after_event: EventName) -> bool:
        """See `MappedRegion`. Never: the front refuses events for host memory."""
        raise ValueError("a CUDA event was named; the region is in host memory")

    def close(self) -> None:
        """See `MappedRegion`."""
        self._mapping.close()


class HostDevice:
    """Host memory: nothing has to be prepared. `native`: what copies; NumPy if it is None."""

    paths: tuple[str, ...] = ("host", "ddr")
    uuid = ""
    facts: GpuFacts | None = None
    numa_node = UNKNOWN_NODE

    def __init__(self, native: Library | None = None, *, copies_by: str = "") -> None:
        self._native = native
        self.copies_by = copies_by

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int], pieces: Sequence[Piece]) -> HostRegion:
        """See `MoverDevice`. The memfds must be sealed against shrinking."""
        if pieces or len(fds) != len(memory_bytes):
            raise InvalidRequest(f"the region names {len(memory_bytes)} memories of the host; {len(fds)} descriptors and {len(pieces)} CUDA memories came")
        for fd, announced_bytes in zip(fds, memory_bytes, strict=True):
            validate_sealed(fd, announced_bytes)
        # What is mapped is what was announced, and never more than the file has: fstat has just said so, and the seals keep it true.
        validate_layout(layout, memory_bytes, planes_max=max(1, len(layout.planes)))
        mapping = map_memories(fds, memory_bytes)
        try:
            mapping.advise(MADV_HUGEPAGE)
            return HostRegion(mapping, plane_views(mapping.bytes, layout, mapping.offsets), self._native)
        except BaseException:
            mapping.close()
            raise

    def benches(self, path: str, volume: Volume, count: int, size_bytes: int) -> Sequence[Mapping]:
        """See `MoverDevice`."""
        return make_all(count, lambda: map_private(size_bytes))

    def adopt_arena(self, arena: Arena, memory_node: int) -> None:
        """See `MoverDevice`."""

    def enter_thread(self, path: str) -> None:
        """See `MoverDevice`."""


class AbsentDevice(HostDevice):
    """A GPU that can't be used: its mover stands, says why, and refuses every region."""

    paths: tuple[str, ...] = ()

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int], pieces: Sequence[Piece]) -> HostRegion:
        """See `MoverDevice`."""
        raise InvalidRequest(self._why)
