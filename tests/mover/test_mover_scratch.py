"""A job that names the scratch area stays inside the device's part of it."""

import os
from pathlib import Path

import numpy as np
import pytest

from offloadd.model.slots import BLOCK_DTYPE
from offloadd.mover.volume import Volume, adopt_volume
from offloadd.tiers.scratch import PROBE_BYTES, SCRATCH_SLAB, Scratch
from offloadd.units import MIB

SLOT_BYTES = 8192
PART = Scratch(7 * MIB, 2 * MIB)
SLOTS = MIB // SLOT_BYTES


def volume(path: Path, scratch: Scratch) -> Volume:
    path.touch()
    os.truncate(path, 64 * MIB)
    fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    return adopt_volume(*fds, volume_uuid=b"u" * 16, slab_bytes=16 * MIB, data_offset=16 * MIB, thread_count=1, scratch=scratch)


def records(*slots: int) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    made = np.zeros(len(slots), dtype=BLOCK_DTYPE)
    made["slab"], made["slot"], made["payload_bytes"] = SCRATCH_SLAB, slots, 4096
    return made


def test_slots_of_the_scratch_area_lie_behind_the_probe_in_the_part(tmp_path: Path) -> None:
    opened = volume(tmp_path / "volume", PART)
    assert opened.slot_offset(records(0), SLOT_BYTES) == 7 * MIB + PROBE_BYTES
    assert opened.slot_offset(records(SLOTS - 1), SLOT_BYTES) == 9 * MIB - SLOT_BYTES
    opened.close()


@pytest.mark.parametrize("scratch", [PART, Scratch(7 * MIB, MIB), Scratch()])
def test_an_io_beyond_the_part_is_refused(tmp_path: Path, scratch: Scratch) -> None:
    opened = volume(tmp_path / "volume", scratch)
    with pytest.raises(ValueError, match="outside the scratch area"):
        opened.slot_offset(records(scratch.slot_count(SLOT_BYTES) - 1 if scratch == PART else 0, scratch.slot_count(SLOT_BYTES)), SLOT_BYTES)
    opened.close()


def test_a_payload_that_does_not_fill_its_slot_is_refused_there_too(tmp_path: Path) -> None:
    opened = volume(tmp_path / "volume", PART)
    with pytest.raises(ValueError, match="belongs into slots of"):
        opened.slot_offset(records(0), 2 * SLOT_BYTES)
    opened.close()
