"""An engine's KV memory with bytes in it that tell blocks apart: in host memory, or on a GPU."""

import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offloadd.client import HostMemory, Plane
from offloadd.client.cuda import DeviceMemory as ExportedMemory
from offloadd.client.cuda import export_pointer
from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.memory import DeviceMemory

Array = npt.NDArray[Any]

#: Of each block, one word further on: no two blocks of a region are alike, and none is like itself moved.
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """`plane_count` planes one behind the other, each with `block_count` pieces of `piece_bytes` side by side."""

    plane_count: int
    block_count: int
    piece_bytes: int

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.plane_count * self.plane_bytes

    @property
    def plane_bytes(self) -> int:
        """One plane."""
        return self.block_count * self.piece_bytes

    @property
    def planes(self) -> list[Plane]:
        """For a region in one memory."""
        return [Plane(0, number * self.plane_bytes, self.piece_bytes, self.piece_bytes) for number in range(self.plane_count)]


class Memory(Protocol):
    """Where a region's planes lie."""

    exported: HostMemory | ExportedMemory

    def read(self, plane: int) -> Array:
        """The plane, uint8 of shape (blocks, piece): a view or a copy, to be given to `write` when it was changed."""

    def write(self, plane: int, content: Array) -> None:
        """Put content into the plane."""


class HostKv:
    """Shared host memory."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.exported: HostMemory | ExportedMemory = HostMemory.allocate(span.memory_bytes)
        self._bytes = self.exported.numpy(np.uint8, (span.plane_count, span.block_count, span.piece_bytes))

    def read(self, plane: int) -> Array:
        """See `Memory`: a view."""
        view: Array = self._bytes[plane]
        return view

    def write(self, plane: int, content: Array) -> None:
        """See `Memory`."""
        if not np.shares_memory(content, self._bytes[plane]):
            self._bytes[plane] = content


class CudaKv:
    """Memory of a GPU, handed over as an engine does. Copies are done when a method returns."""

    def __init__(self, device: Device, span: Span) -> None:
        self._device = device
        self._span = span
        self._memory = DeviceMemory.allocate(device, span.memory_bytes)
        self.exported: HostMemory | ExportedMemory = export_pointer(self._memory.address, span.memory_bytes)

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self._memory.address

    def read(self, plane: int) -> Array:
        """See `Memory`: a copy."""
        self._device.make_current()
        content: Array = np.empty((self._span.block_count, self._span.piece_bytes), dtype=np.uint8)
        check(load().cuMemcpyDtoH(content.ctypes.data, self._at(plane), content.nbytes), "copy a plane from the GPU")
        return content

    def write(self, plane: int, content: Array) -> None:
        """See `Memory`."""
        self._device.make_current()
        source = np.ascontiguousarray(content)
        check(load().cuMemcpyHtoD(self._at(plane), source.ctypes.data, source.nbytes), "copy a plane to the GPU")

    def _at(self, plane: int) -> int:
        return self._memory.address + plane * self._span.plane_bytes


class Pattern:
    """What the blocks of a region hold when nothing was lost: block b is a run of random words that begins at word b."""

    def __init__(self, span: Span) -> None:
        self._span = span
        payload_bytes = span.plane_count * span.piece_bytes
        # Of each region its own: bytes of another engine's blocks must not pass for ours.
        random = np.random.default_rng(uuid.uuid4().int)
        self._words = random.integers(0, 256, payload_bytes + span.block_count * _WORD_BYTES, dtype=np.uint8)

    def plane(self, number: int) -> Array:
        """Read-only, of shape (blocks, piece)."""
        begin = self._words[number * self._span.piece_bytes :]
        return np.lib.stride_tricks.as_strided(begin, (self._span.block_count, self._span.piece_bytes), (_WORD_BYTES, 1), writeable=False)

    def fill(self, memory: Memory) -> None:
        """Put it into all blocks."""
        for number in range(self._span.plane_count):
            memory.write(number, self.plane(number))

    def wipe(self, memory: Memory, blocks: Array) -> None:
        """Put into these blocks what they do not hold: the complement, so that no byte is right by chance."""
        for number in range(self._span.plane_count):
            content = memory.read(number)
            content[blocks] = ~self.plane(number)[blocks]
            memory.write(number, content)

    def wrong(self, memory: Memory, blocks: Array) -> int:
        """How many of these blocks hold a byte that is not theirs."""
        bad = np.zeros(len(blocks), dtype=np.bool_)
        for number in range(self._span.plane_count):
            bad |= (memory.read(number)[blocks] != self.plane(number)[blocks]).any(axis=1)
        return int(bad.sum())
