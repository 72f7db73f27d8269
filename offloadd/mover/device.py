"""What a mover needs of the device that its regions lie in, and the host's answer to it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import MADV_HUGEPAGE, Mapping, map_memories, map_private
from offloadd.memory.memfd import validate_sealed
from offloadd.memory.planes import plane_views
from offloadd.model.region import Layout, validate_layout
from offloadd.mover.arena import Arena
from offloadd.transfer.gather import Payloads, Views, block_crc, gather, payload_bytes, scatter

Indices = npt.NDArray[Any]


class MappedRegion(Protocol):
    """An engine's memory, mapped. Copies have ended when a method returns; all raise ValueError, before any byte moves, for a block that it does not have."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block."""

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None) -> None:
        """Copy payload bytes `first` to `last` (None: all) of each block to its place in memory of ours."""

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None) -> None:
        """Copy payload bytes `first` to `last` (None: all) of each block from its place in memory of ours."""

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """CRC32C of payload bytes `first` to `last` (None: all) of one block, as they are in engine memory."""

    def close(self) -> None:
        """Unmap."""


class MoverDevice(Protocol):
    """One device. `paths`: names of the ways that its mover has. All methods may be called from any thread."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Path names, for `Hello`."""

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int]) -> MappedRegion:
        """Map memories handed over by descriptor, which stay the caller's to close. Raises InvalidRequest, OSError or ValueError; nothing is mapped then."""

    def staging(self, size_bytes: int) -> Mapping:
        """Memory that slots are staged in. Raises OSError."""

    def adopt_arena(self, arena: Arena) -> None:
        """The arena was mapped: prepare it for this device's copies, in the background if that takes long."""

    def enter_thread(self) -> None:
        """The calling thread will copy."""


class HostRegion:
    """A region in memfds: views [plane, block, byte] in payload order over one mapping."""

    def __init__(self, mapping: Mapping, views: Views) -> None:
        self._mapping = mapping
        self._views = views
        self.payload_bytes = payload_bytes(views)

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None) -> None:
        """See `MappedRegion`."""
        gather(self._views, block_indices, target, first, last)

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None) -> None:
        """See `MappedRegion`."""
        scatter(self._views, block_indices, source, first, last)

    def block_crc(self, block_index: int, first: int, last: int | None) -> int:
        """See `MappedRegion`."""
        return block_crc(self._views, block_index, first, last)

    def close(self) -> None:
        """See `MappedRegion`."""
        self._mapping.close()


class HostDevice:
    """Host memory: nothing has to be prepared."""

    paths = ("host", "ddr")

    def map_region(self, layout: Layout, memory_bytes: tuple[int, ...], fds: Sequence[int]) -> HostRegion:
        """See `MoverDevice`. The memfds must be sealed against shrinking."""
        if len(fds) != len(memory_bytes):
            raise InvalidRequest(f"the region names {len(memory_bytes)} memories; {len(fds)} descriptors came")
        for fd, announced_bytes in zip(fds, memory_bytes, strict=True):
            validate_sealed(fd, announced_bytes)
        # What is mapped is what was announced, and never more than the file has: fstat has just said so, and the seals keep it true.
        validate_layout(layout, memory_bytes, planes_max=max(1, len(layout.planes)))
        mapping = map_memories(fds, memory_bytes)
        try:
            mapping.advise(MADV_HUGEPAGE)
            return HostRegion(mapping, plane_views(mapping.bytes, layout, mapping.offsets))
        except BaseException:
            mapping.close()
            raise

    def staging(self, size_bytes: int) -> Mapping:
        """See `MoverDevice`."""
        return map_private(size_bytes)

    def adopt_arena(self, arena: Arena) -> None:
        """See `MoverDevice`."""

    def enter_thread(self) -> None:
        """See `MoverDevice`."""
