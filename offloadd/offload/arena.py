"""The arena's memory as the front makes it: one memfd, and which NUMA node each slab of it is to lie on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from offloadd.errors import Unavailable
from offloadd.memory.memfd import HUGE_PAGE_BYTES, create_sealed
from offloadd.mover.messages import ArenaPart


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """The arena's memfd. `slab_nodes`: the node of each slab; empty where there is one node only. `pages`: what it lies on, for people."""

    fd: int
    arena_bytes: int
    slab_bytes: int
    huge_pages: bool
    pages: str
    slab_nodes: tuple[int, ...]

    @property
    def parts(self) -> tuple[ArenaPart, ...]:
        """The stretches of slabs of one node."""
        return tuple(ArenaPart(node, len(list(slabs)) * self.slab_bytes) for node, slabs in groupby(self.slab_nodes))


def make_arena(arena_bytes: int, slab_bytes: int, *, huge_pages: str, nodes: Sequence[tuple[int, int]]) -> ArenaMemory:
    """A new arena; the caller closes its descriptor. `nodes`: (number, bytes of memory). Raises Unavailable if huge pages are required and not there."""
    fd = create_sealed("offloadd-arena", arena_bytes, huge=huge_pages != "never")
    reserved = os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES
    if huge_pages == "require" and not reserved:
        os.close(fd)
        raise Unavailable(f'arena: {arena_bytes} bytes of reserved 2 MiB pages are not free (vm.nr_hugepages); arena.huge_pages = "auto" does without')
    pages = "reserved 2 MiB pages" if reserved else "ordinary pages" + (", huge ones advised" if huge_pages == "auto" else "")
    return ArenaMemory(fd, arena_bytes, slab_bytes, huge_pages != "never", pages, spread_slabs(arena_bytes // slab_bytes, nodes))


def spread_slabs(slab_count: int, nodes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The node of each slab: as many of each as the node, (number, bytes), has of all memory, those of one node side by side.

    Empty where there is nothing to choose: fewer than two nodes, or slabs for one of them only.
    """
    whole = sum(memory_bytes for _, memory_bytes in nodes)
    slabs: list[int] = []
    before = 0
    for node, memory_bytes in nodes:
        before += memory_bytes
        slabs += [node] * (round(slab_count * before / whole) - len(slabs))
    return tuple(slabs) if len(set(slabs)) > 1 else ()
