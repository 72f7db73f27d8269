"""What a machine has room for: engine memory, arena and volumes of one configuration, and which cases are too large."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bench.grid.ceilings import COPY_BYTES_MAX
from bench.support.rows import Case
from offloadd.config import ArenaConfig
from offloadd.tiers.format import slot_bytes_for, slot_count_for
from offloadd.units import GIB, MIB, SECTOR_BYTES, align_up, format_bytes

#: Host memory that is left alone: processes, page tables, the kernel.
SPARE_BYTES = GIB
#: What may be taken of the rest by engines on the host; the arena gets as much. Beside them two buffers of the ceiling's.
HOST_SHARE = 0.4
#: Requests in flight are stored twice over: evicts go on while what they evicted before is still there.
SETS = 2
#: Slabs beyond what the blocks fill: each slot size has some of its own, and open ones are not full.
SPARE_SLABS = 2
ARENA_SLAB_BYTES: int = ArenaConfig.model_fields["slab_bytes"].default
SLAB_BYTES, SLAB_BYTES_TINY = 256 * MIB, 32 * MIB


def in_flight(case: Case) -> int:
    """Blocks of all requests that are in flight on one engine."""
    return case.block_count * case.queue_depth


def arena_slot_bytes(case: Case) -> int:
    """What a block takes in the arena."""
    return align_up(case.block_bytes, SECTOR_BYTES)


def arena_need(case: Case) -> int:
    """Bytes of an arena, whole slabs, that holds what the case stores."""
    slots = SETS * in_flight(case) * max(1, case.gpu_count)
    per_slab = max(1, slot_count_for_arena(arena_slot_bytes(case)))
    return (-(-slots // per_slab) + SPARE_SLABS) * ARENA_SLAB_BYTES


def slot_count_for_arena(slot_bytes: int) -> int:
    """Slots of one slab of the arena."""
    return ARENA_SLAB_BYTES // slot_bytes


def volume_slots(case: Case) -> int:
    """Slots of each volume that hold what the case stores."""
    return -(-SETS * in_flight(case) * max(1, case.gpu_count) // max(1, case.volume_count))


def volume_need(case: Case, slab_bytes: int) -> int:
    """Bytes of each volume for it, tables included."""
    per_slab = max(1, slot_count_for(slab_bytes, slot_bytes_for(case.block_bytes)))
    return (-(-volume_slots(case) // per_slab) + SPARE_SLABS) * slab_bytes + 16 * MIB


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Bytes of host memory for all engines together, and for the arena."""

    engine_bytes: int
    arena_bytes: int

    @classmethod
    def now(cls) -> "HostRoom":
        """By what is available now."""
        share = int(max(0, psutil.virtual_memory().available - SPARE_BYTES - 2 * COPY_BYTES_MAX) * HOST_SHARE)
        return cls(share, share // ARENA_SLAB_BYTES * ARENA_SLAB_BYTES)

    def arena_for(self, cases: Sequence[Case]) -> int:
        """The arena that the largest case needs, as far as there is room."""
        return min(self.arena_bytes, max((arena_need(case) for case in cases if case.path == "ddr"), default=0))

    def fault(self, case: Case) -> str:
        """Why there is no room for the case; empty if there is."""
        if case.path == "ddr" and arena_need(case) > self.arena_bytes:
            return f"needs an arena of {format_bytes(arena_need(case))}; {format_bytes(self.arena_bytes)} of host memory can be given to it"
        needed = in_flight(case) * case.block_bytes
        if case.gpu_count == 0 and needed > self.engine_bytes:
            return f"needs {format_bytes(needed)} of engine memory; {format_bytes(self.engine_bytes)} of host memory can be given to it"
        return ""


def gpu_fault(case: Case, free_bytes: int) -> str:
    """Why a GPU with so much free memory has no room for the case; empty if it has. A quarter is left to contexts, staging slots and ceilings."""
    needed, room = in_flight(case) * case.block_bytes, free_bytes * 3 // 4
    return f"needs {format_bytes(needed)} of GPU memory; {format_bytes(room)} can be given to it" if needed > room else ""


def volume_fault(case: Case, slots: Sequence[int], slab_bytes: int) -> str:
    """Why volumes with so many slots each have no room for the case; empty if they have."""
    if case.path == "ddr":
        return ""
    spare = SPARE_SLABS * slot_count_for(slab_bytes, slot_bytes_for(case.block_bytes))
    short = [have for have in slots if have < volume_slots(case) + spare]
    return f"needs {volume_slots(case) + spare} slots on each volume; one has room for {min(short)}" if short else ""
