"""Flags: 64-bit words in GPU memory of another process, which say how far the work in its streams has come."""

import mmap
import threading

import numpy as np
import numpy.typing as npt

from offloadd.cuda.device import Device
from offloadd.cuda.imports import IpcMemory
from offloadd.cuda.memory import HostRegistration
from offloadd.cuda.plain import copy
from offloadd.cuda.region import MemoryPart
from offloadd.cuda.streams import Event, Stream
from offloadd.memory.mapping import Mapping, map_private
from offloadd.model.device_event import FLAG_WORD_BYTES

Words = npt.NDArray[np.uint64]

#: Eight bytes travel in microseconds. A copy that takes this long will not end.
READ_TIMEOUT_S = 20.0


class FlagReader:
    """Reads words on one device: by copies to page-locked memory on a stream of its own, so nobody waits, neither a thread nor a copy of a block.

    Not by cuStreamWaitValue64 in a stream of ours: behind a flag that never comes the stream would wait for ever, nothing can call such a wait back, and what
    the driver lets wait for all work of the context (closing an engine's memory, freeing ours) would hang with it.

    Any thread may call.
    """

    def __init__(self, device: Device) -> None:
        """Takes nothing from the driver before the first flag."""
        self.device = device
        self.lock = threading.Lock()
        self._stream: Stream | None = None
        #: Page-locked cells of one word each that no flag has. A page of them is made when there is none, and kept: flags come and go.
        self._free: list[Words] = []
        self._pages: list[tuple[Mapping, HostRegistration]] = []

    def open(self, memory: IpcMemory, offset_bytes: int) -> "Flag":
        """The word at `offset_bytes` of an engine's allocation, which the flag closes with itself; after an error it stays the caller's.

        Raises InvalidRequest unless the word lies in the allocation, CudaError when the driver has no event, stream or page-locked page left.
        """
        part = MemoryPart.of(memory, offset_bytes, FLAG_WORD_BYTES)
        done = Event.create(self.device)
        try:
            with self.lock:
                if self._stream is None:
                    self._stream = Stream.create(self.device)
                if not self._free:
                    self._free = self._page()
                cell = self._free.pop()
                # What the flag before saw is not this one's.
                cell[:] = 0
                return Flag(self, memory, part.address, cell, done, self._stream)
        except BaseException:
            done.close()
            raise

    def _page(self) -> list[Words]:
        mapping = map_private(mmap.PAGESIZE)
        try:
            registration = HostRegistration.register(self.device, mapping.bytes.ctypes.data, mapping.bytes.nbytes)
        except BaseException:
            mapping.close()
            raise
        self._pages.append((mapping, registration))
        words = mapping.bytes.view(np.uint64)
        return [words[index : index + 1] for index in range(len(words))]

    def take_back(self, cell: Words) -> None:
        """A flag that is closed needs its cell no more: no copy into it is under way."""
        with self.lock:
            self._free.append(cell)

    def close(self) -> None:
        """Give the stream and the page-locked pages back. All flags are closed before."""
        with self.lock:
            self._free.clear()
            while self._pages:
                mapping, registration = self._pages.pop()
                registration.close()
                mapping.close()
            if self._stream is not None:
                self._stream.close()
                self._stream = None


class Flag:
    """One word. `FlagReader.open` makes it. For one thread at a time."""

    def __init__(self, reader: FlagReader, memory: IpcMemory, address: int, cell: Words, copied: Event, stream: Stream) -> None:
        self._reader = reader
        self._memory = memory
        self._address = address
        self._cell = cell
        self._copied = copied
        self._stream = stream
        self._under_way = False
        self._seen = 0
        self._closed = False

    def has_reached(self, value: int) -> bool:
        """Whether the word was seen to be `value` or more, unsigned. Never waits: the first look only asks the device, a later one sees the answer.

        At most one copy of 8 bytes is under way. True holds from then on, as words only rise. Raises CudaError when work on the device has failed.

        The order of memory: cuStreamWriteValue64 writes the word behind the kernels and copies before it in the engine's stream, and makes all that they wrote
        visible to the whole system before (its default memory barrier). Whoever has seen the word, and queues a copy after that, copies what they wrote. The
        eight bytes are aligned, lie in one sector of the GPU's memory, and so are never half old and half new.
        """
        if self._under_way:
            if not self._copied.is_done():
                return False
            self._under_way = False
            self._seen = max(self._seen, int(self._cell[0]))
        if self._seen >= value:
            return True
        with self._reader.lock:
            copy(self._cell.ctypes.data, self._address, FLAG_WORD_BYTES, self._stream)
            self._under_way = True
            self._stream.record(self._copied)
        return False

    def close(self) -> None:
        """Give the memory back. May be called again.

        Waits for a copy that is under way, since its cell goes to another flag. Raises TimeoutError if it does not end.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._under_way:
                self._copied.synchronize(READ_TIMEOUT_S)
            self._reader.take_back(self._cell)
            self._copied.close()
        finally:
            self._memory.close()
