"""Host memory that becomes page-locked chunk by chunk, while copies of it are being made already."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.memory import HostRegistration

Offsets = npt.NDArray[Any]
#: Which of several stretches, and whether the GPU reaches them by DMA.
Part = tuple[npt.NDArray[np.bool_] | slice, bool]

#: In place of a chunk: a stretch lies in two.
_NONE = -1


class LockedChunks:
    """Chunks side by side from `address` on, each locked or not, and once locked for ever. `lock` runs in one thread; all else may be called from any."""

    def __init__(self, device: Device, address: int, sizes_bytes: Sequence[int]) -> None:
        self._device = device
        self._address = address
        self._ends = np.cumsum(np.asarray(sizes_bytes, dtype=np.int64))
        self._locked = np.zeros(len(sizes_bytes), dtype=np.bool_)
        self._registrations: list[HostRegistration] = []

    @property
    def locked_bytes(self) -> int:
        """Bytes of the chunks that are locked."""
        return sum(registration.registered_bytes for registration in self._registrations)

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunks."""
        return int(self._ends[-1])

    def lock(self, order: Sequence[int]) -> None:
        """Lock the chunks of these numbers, one after the other.

        Raises CudaError at the first one that the system refuses, and tries no further: the limit is on the sum of them all, and staging slots come later. To
        leave room for those, the chunk before it is given back, too; nobody has been told of it yet.
        """
        last: tuple[int, HostRegistration] | None = None
        for number in order:
            end = int(self._ends[number])
            start = int(self._ends[number - 1]) if number else 0
            try:
                registration = HostRegistration.register(self._device, self._address + start, end - start, chunk_bytes=end - start)
            except CudaError:
                if last is not None:
                    last[1].close()
                raise
            self._tell(last)
            last = (number, registration)
        self._tell(last)

    def _tell(self, locked: tuple[int, HostRegistration] | None) -> None:
        if locked is not None:
            self._registrations.append(locked[1])
            self._locked[locked[0]] = True

    def holds(self, address: int) -> bool:
        """Whether memory at this address is in the chunks."""
        return self._address <= address < self._address + self.size_bytes

    def parts(self, offsets: Offsets, size_bytes: int) -> list[Part]:
        """Stretches of `size_bytes` at these offsets, chunk by chunk: which, and whether the chunk is locked.

        Each chunk is a registration of its own, and no copy should reach over the end of one: neighbours may be one rectangle of a 2D copy. A stretch that lies
        in two chunks counts as not locked. Raises IndexError for one that lies in none.
        """
        first = np.searchsorted(self._ends, offsets, side="right")
        last = np.searchsorted(self._ends, offsets + (size_bytes - 1), side="right")
        chunk = np.where(first == last, first, _NONE)
        if chunk.size and (chunk == chunk[0]).all():
            return [(slice(None), self._is_locked(int(chunk[0])))]
        return [(chunk == one, self._is_locked(one)) for one in np.unique(chunk).tolist()]

    def _is_locked(self, chunk: int) -> bool:
        return chunk != _NONE and bool(self._locked[chunk])

    def close(self) -> None:
        """Unlock all; no copy may run, and `lock` must be over. May be called again."""
        self._locked[:] = False
        while self._registrations:
            self._registrations.pop().close()
