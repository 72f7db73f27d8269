"""The regions mapped from engines, who copies in them right now, and which moves may not touch them any more.

Every copy runs inside `borrow`. A fence or an unmap first closes the door and then waits for those inside, so that after its answer no byte of engine
memory is read or written. Borrowing spans memory work only, never an I/O: a hung volume can't hold up a fence.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offloadd.mover.device import MappedRegion


class EngineMemory:
    """Regions by the front's number. All methods may be called from any thread."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """`settle` is called before each copy; it returns when all fences that have been sent are known here."""
        self._settle = settle
        self._changed = threading.Condition()
        self._regions: dict[int, MappedRegion] = {}
        self._region_users: Counter[int] = Counter()
        self._move_users: Counter[int] = Counter()
        #: Bounded by the front: each move is forgotten when it is over.
        self._fenced: set[int] = set()
        self._closed = False

    def add(self, number: int, region: MappedRegion) -> None:
        """Make a region known. Raises ValueError when the number is in use."""
        with self._changed:
            if self._closed:
                raise ValueError(f"region {number} is not mapped: the mover is being replaced")
            # A number waits here until its last copy has ended, so a new region can never be taken for an old one.
            if number in self._regions or self._region_users[number]:
                raise ValueError(f"region {number} is already mapped")
            self._regions[number] = region

    def remove(self, number: int) -> None:
        """Let no new copy in, wait for the running ones, unmap. Does nothing for an unknown region."""
        with self._changed:
            region = self._regions.pop(number, None)
            self._changed.wait_for(lambda: not self._region_users[number])
            del self._region_users[number]
        if region is not None:
            region.close()

    def close(self) -> None:
        """Let no copy in any more, of whatever region; wait for the running ones, and unmap everything. For good."""
        with self._changed:
            self._closed = True
            regions, self._regions = self._regions, {}
            self._changed.wait_for(lambda: not any(self._region_users.values()))
        for region in regions.values():
            region.close()

    def fence(self, move: int) -> None:
        """Let no copy of the move in any more and wait for the running ones."""
        with self._changed:
            self._fenced.add(move)
            self._changed.wait_for(lambda: not self._move_users[move])
            del self._move_users[move]

    def forget(self, move: int) -> None:
        """Drop the move's fence."""
        with self._changed:
            self._fenced.discard(move)

    def fenced(self, move: int) -> bool:
        """Whether the move is fenced."""
        with self._changed:
            return move in self._fenced

    @contextmanager
    def borrow(self, move: int, numbers: Sequence[int]) -> Iterator[dict[int, MappedRegion] | None]:
        """The regions by number, mapped until the block ends; None when the move is fenced or a region is not mapped (any more)."""
        self._settle()
        with self._changed:
            admitted = move not in self._fenced and all(number in self._regions for number in numbers)
            regions = {number: self._regions[number] for number in numbers} if admitted else None
            if regions is not None:
                self._move_users[move] += 1
                self._region_users.update(numbers)
        try:
            yield regions
        finally:
            if regions is not None:
                with self._changed:
                    self._move_users[move] -= 1
                    if not self._move_users[move]:
                        del self._move_users[move]
                    self._region_users.subtract(numbers)
                    self._changed.notify_all()
