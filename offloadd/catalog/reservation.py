"""What a pool answers: slots handed out, why there are fewer than asked for, and what it asks of the owner of the slabs."""

from dataclasses import dataclass
from enum import IntEnum

from offloadd.catalog.slab import Rows


class Shortage(IntEnum):
    """Why a reservation got fewer slots than asked for."""

    NONE = 0
    #: A slab is being opened or cut; ask again when it is ready.
    OPENING = 1
    #: Nothing may be reclaimed.
    FULL = 2
    #: No slab can hold a slot of this size.
    TOO_LARGE = 3
    #: The volume may write no more now: its budget of the day is used up.
    BUDGET = 4


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots handed out, equal-length arrays, in allocation order; and the rows whose blocks lost their slot for it."""

    slabs: Rows
    slots: Rows
    generations: Rows
    victims: Rows
    shortage: Shortage

    def __len__(self) -> int:
        return int(self.slabs.shape[0])


@dataclass(frozen=True, slots=True)
class Wish:
    """What the owner of the slabs is asked to do: cut (slot_bytes > 0) or open the slab."""

    slab: int
    slot_bytes: int
