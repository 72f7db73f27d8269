"""Mappings end when they are closed, and memories of one region lie side by side."""

import os
from pathlib import Path

import numpy as np
import pytest

from offloadd.memory.mapping import map_memories, map_private
from offloadd.memory.memfd import create_sealed, map_shared
from offloadd.memory.planes import PlaneGroup, merge_planes, plane_views
from offloadd.model.region import Layout, Plane
from offloadd.units import MIB


def _maps():
    return Path("/proc/self/maps").read_text()


def test_a_closed_mapping_is_gone_though_arrays_still_refer_to_it():
    fds = [create_sealed(f"side-{number}", size) for number, size in enumerate((5000, 3 * MIB, 1))]
    mapping = map_memories(fds, (5000, 3 * MIB, 1))
    view = mapping.bytes[10:20]
    assert mapping.offsets == (0, 2 * MIB, 6 * MIB) and "memfd:side-1" in _maps()
    for number, (fd, offset) in enumerate(zip(fds, mapping.offsets, strict=True)):
        mapping.bytes[offset] = number + 1
        with map_shared(fd, 1) as other:
            assert other[0] == number + 1
    mapping.close()
    mapping.close()
    assert "memfd:side-" not in _maps() and view.size == 10
    for fd in fds:
        os.close(fd)


def test_a_failed_mapping_leaves_nothing_behind():
    fd = create_sealed("lonely", 5000)
    with pytest.raises(OSError, match="mmap of 4096 bytes"):
        map_memories([fd, -1], (5000, 4096))
    assert "memfd:lonely" not in _maps()
    os.close(fd)


def test_private_memory_is_zero_aligned_and_present():
    mapping = map_private(MIB)
    assert mapping.bytes.size == MIB and mapping.bytes.ctypes.data % (2 * MIB) == 0 and not mapping.bytes.any()
    mapping.close()


def test_planes_of_layers_in_equal_memories_become_one_group():
    layout = Layout(10, tuple(Plane(memory, 0, 4096, 4096) for memory in range(8)))
    assert merge_planes(layout, [number * 2 * MIB for number in range(8)]) == [PlaneGroup(0, 8, 2 * MIB, 4096, 4096)]


def test_planes_that_touch_in_every_block_become_one_piece():
    layout = Layout(10, tuple(Plane(0, layer * 512, 8 * 512, 512) for layer in range(8)))
    assert merge_planes(layout, [100]) == [PlaneGroup(100, 1, 0, 4096, 4096)]


def test_unlike_planes_stay_apart():
    layout = Layout(4, (Plane(0, 0, 100, 100), Plane(0, 400, 50, 50), Plane(0, 700, 100, 100)))
    assert len(merge_planes(layout, [0])) == 3


def test_a_view_that_leaves_its_memory_is_refused():
    with pytest.raises(ValueError):
        plane_views(np.zeros(999, dtype=np.uint8), Layout(10, (Plane(0, 0, 100, 100),)), [0])
