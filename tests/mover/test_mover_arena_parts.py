"""The arena's parts on NUMA nodes, and the chunks that it is page-locked in."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offloadd.errors import InvalidRequest
from offloadd.memory.memfd import create_sealed
from offloadd.mover.arena import CHUNK_BYTES_MAX, Chunk, cut_chunks
from offloadd.mover.messages import ArenaPart, MapArena, Mapped, NotMapped, Operation
from offloadd.units import GIB, MIB

from .mover_harness import Engine, Mover, make_records, plain

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("slab_bytes", [2 * MIB, 64 * MIB, 96 * MIB, 700 * MIB, GIB])
@pytest.mark.parametrize("slab_counts", [(1,), (7,), (40,), (3, 50), (1, 1, 1)])
def test_chunks_hold_whole_slabs_of_one_node_and_are_the_whole_arena(slab_bytes: int, slab_counts: tuple[int, ...]) -> None:
    parts = [ArenaPart(node, count * slab_bytes) for node, count in enumerate(slab_counts)]
    chunks = cut_chunks(sum(slab_counts) * slab_bytes, slab_bytes, parts if len(parts) > 1 else ())
    ends = np.cumsum([chunk.size_bytes for chunk in chunks])
    assert [chunk.offset_bytes for chunk in chunks] == [0, *ends[:-1].tolist()] and ends[-1] == sum(slab_counts) * slab_bytes
    borders = set(np.cumsum([part.size_bytes for part in parts]).tolist())
    assert borders <= set(ends.tolist()), "a chunk lies on two nodes"
    for chunk in chunks:
        assert chunk.offset_bytes % slab_bytes == chunk.size_bytes % slab_bytes == 0 and 0 < chunk.size_bytes <= CHUNK_BYTES_MAX


def test_an_arena_without_parts_is_on_no_node() -> None:
    assert cut_chunks(3 * GIB // 2, GIB // 2, ()) == (Chunk(-1, 0, GIB), Chunk(-1, GIB, GIB // 2))


@pytest.mark.parametrize(
    ("parts", "slab_bytes"),
    [([(0, 32), (1, 32)], 16), ([(0, 32), (1, 72)], 16), ([(0, 40), (1, 56)], 16), ([(0, 0), (1, 96)], 16), ([(0, 192), (1, -96)], 16)],
)
def test_parts_that_are_not_the_arena_in_whole_slabs_are_refused(parts: list[tuple[int, int]], slab_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=f"together they must have {96 * MIB}, and each whole slabs of {slab_bytes * MIB}"):
        cut_chunks(96 * MIB, slab_bytes * MIB, [ArenaPart(node, size * MIB) for node, size in parts])


def test_a_mover_refuses_parts_that_are_not_the_arena(mover) -> None:  # type: ignore[no-untyped-def]
    fd = create_sealed("arena", 96 * MIB)
    parts = (ArenaPart(0, 32 * MIB), ArenaPart(0, 32 * MIB))
    answer = mover.ask(MapArena(arena_bytes=96 * MIB, huge_pages=False, slab_bytes=16 * MIB, parts=parts), [fd])
    assert isinstance(answer, NotMapped) and "together they must have" in answer.error
    mover.map_arena(fd, 96 * MIB)
    os.close(fd)


#: A node that this machine has, and one that it has not.
@pytest.mark.parametrize("nodes", [(0, 0), (0, 63)])
def test_blocks_come_back_from_every_part_wherever_it_may_lie(capfd: pytest.CaptureFixture[str], nodes: tuple[int, int]) -> None:
    mover, engine, fd = Mover(), Engine(*plain(16, 20000)), create_sealed("arena", 64 * MIB)
    engine.fill()
    assert mover.map_region(engine) == Mapped(region=1)
    parts = tuple(ArenaPart(node, 32 * MIB) for node in nodes)
    assert mover.ask(MapArena(arena_bytes=64 * MIB, huge_pages=False, slab_bytes=16 * MIB, parts=parts), [fd]) == Mapped(region=0)
    lane = mover.add_lane()
    expected = [engine.read(block) for block in range(8)]
    # From one part over the border into the other.
    first = 32 * MIB - 4 * 20480
    stored = lane.run(Operation.ARENA_EVICT, make_records(range(8), 20000, arena_first=first, arena_step=20480), 20480)
    back = make_records(range(8, 16), 20000, arena_first=first, arena_step=20480, checksum=stored.checksums)
    assert stored.reasons == lane.run(Operation.ARENA_RESTORE, back, 20480).reasons == [0] * 8
    assert [engine.read(block) for block in range(8, 16)] == expected
    mover.close()
    engine.close()
    os.close(fd)
    told = capfd.readouterr().err
    assert ("mbind to node 63: EINVAL" in told) == (63 in nodes) and told.count("other NUMA nodes") == (63 in nodes)


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_a_container_that_refuses_to_place_memory_is_told_once_and_served(error: str) -> None:
    code = f"""
import errno, os
from tests.memory.refuse_calls import refuse
from offloadd.memory.memfd import create_sealed
from offloadd.memory.numa import _MBIND
from offloadd.mover.arena import map_arena
from offloadd.mover.messages import ArenaPart
refuse(_MBIND[os.uname().machine], errno.{error})
fd = create_sealed("arena", 1 << 22)
arena = map_arena(fd, 1 << 22, huge_pages=False, slab_bytes=1 << 21, parts=(ArenaPart(0, 1 << 21), ArenaPart(1, 1 << 21)))
arena.bytes[:] = 7
print(int(arena.bytes.sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
    assert int(done.stdout) == 7 << 22
    assert done.stderr.count("mover:") == 1 and f"mbind to node 0: {error}" in done.stderr and f"mbind to node 1: {error}" in done.stderr
