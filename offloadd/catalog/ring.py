"""The slabs of one slot size in the order in which the CLOCK hand visits them."""

from collections.abc import Iterator

from offloadd.catalog.slab import Slab


class Ring:
    """Slabs in the order in which they were cut; the hand points at one of them, and `Slab.hand` at a slot in it."""

    __slots__ = ("_hand", "_slabs")

    def __init__(self) -> None:
        self._slabs: list[Slab] = []
        self._hand = 0

    def __len__(self) -> int:
        return len(self._slabs)

    def __iter__(self) -> Iterator[Slab]:
        return iter(self._slabs)

    def add(self, slab: Slab) -> None:
        """The hand comes to it last."""
        # Right behind the hand: what was just cut holds the youngest blocks.
        self._slabs.insert(self._hand, slab)
        self._hand = (self._hand + 1) % len(self._slabs)

    def remove(self, slab: Slab) -> None:
        """It is no longer of this size. The hand stays where it is."""
        position = self._slabs.index(slab)
        del self._slabs[position]
        if position < self._hand:
            self._hand -= 1
        if self._hand >= len(self._slabs):
            self._hand = 0

    @property
    def at_hand(self) -> Slab:
        """The slab that the hand points at."""
        return self._slabs[self._hand]

    def step(self) -> None:
        """The hand is done with this slab: on to the first slot of the next one."""
        self._slabs[self._hand].hand = 0
        self._hand = (self._hand + 1) % len(self._slabs)

    def next(self, count: int) -> list[Slab]:
        """The slab at hand and those that follow, up to `count`."""
        return [self._slabs[(self._hand + offset) % len(self._slabs)] for offset in range(min(count, len(self._slabs)))]

    def jump(self, slabs: set[int]) -> Slab | None:
        """Move the hand to the first slot of the nearest slab out of these (by index), itself included; None where there is none."""
        for offset in range(len(self._slabs)):
            position = (self._hand + offset) % len(self._slabs)
            if self._slabs[position].index in slabs:
                self._hand = position
                self._slabs[position].hand = 0
                return self._slabs[position]
        return None
