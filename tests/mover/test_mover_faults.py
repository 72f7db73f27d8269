"""Whatever is wrong on the volume or in a job, its reason is told and no wrong byte reaches the engine."""

import os
import time

import numpy as np
import pytest

from offloadd.model.enums import Reason
from offloadd.mover.messages import NotMapped, Operation
from offloadd.tiers.format import SLOT_DTYPE, seal, slot_bytes_for
from offloadd.units import MIB, align_up

from .mover_harness import Engine, make_records, plain

SLOT_BYTES = slot_bytes_for(20000)


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def lane(mover, volume, engine):
    lane = mover.add_lane(volume)
    assert lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES).reasons == [0] * 8
    return lane


def _restore(lane, engine, bad, reason, **options):
    """Restore eight blocks into the upper eight, of which the `bad` ones must fail and stay as they were."""
    before = [engine.read(block) for block in range(16)]
    outcome = lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), SLOT_BYTES, **options)
    assert outcome.reasons == [reason if index in bad else 0 for index in range(8)]
    for index in range(8):
        assert engine.read(8 + index) == (before[8 + index] if index in bad else before[index])


@pytest.mark.parametrize("at", [0, 7000, 19999])
def test_a_flipped_payload_bit_stops_its_block_and_no_other(lane, engine, volume, at):
    volume.flip(0, 5, SLOT_BYTES, 4096 + at)
    _restore(lane, engine, {5}, Reason.CHECKSUM_MISMATCH)


@pytest.mark.parametrize("at", [0, 9, 33, 130, 300, 4000, 4093])
def test_a_flipped_header_bit_stops_its_block_and_no_other(lane, engine, volume, at):
    volume.flip(0, 2, SLOT_BYTES, at)
    _restore(lane, engine, {2}, Reason.HEADER_MISMATCH)


def test_without_verification_the_flipped_byte_reaches_the_engine(lane, engine, volume):
    """The negative control: it is the check that stops the byte, nothing else."""
    volume.flip(0, 5, SLOT_BYTES, 4096 + 7000)
    want = bytearray(engine.read(5))
    want[7000] ^= 1
    assert lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), SLOT_BYTES, verify=False).reasons == [0] * 8
    assert engine.read(13) == bytes(want)


@pytest.mark.parametrize("field", ["key", "nonce", "generation", "namespace_ordinal", "namespace_epoch"])
def test_a_slot_of_another_block_is_not_restored(lane, engine, field):
    records = make_records(range(8, 16), 20000)
    if field in ("key", "nonce"):
        records[field][3] = np.void(os.urandom(records[field].dtype.itemsize))
    else:
        records[field][3] += 1
    before = engine.snapshot()
    outcome = lane.run(Operation.RESTORE, _renumber(records[3:4]), SLOT_BYTES)
    assert outcome.reasons == [Reason.HEADER_MISMATCH]
    assert engine.snapshot() == before


def _renumber(records):
    records = records.copy()
    records["position"] = np.arange(len(records))
    return records


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload_bytes", 19999),
        ("slab", 1),
        ("slot", 4),
        ("volume_uuid", np.void(b"\1" * 16)),
        ("codec", 1),
        ("cipher", 1),
        ("checksum_kind", 2),
        ("format_version", 2),
    ],
)
def test_a_sound_header_that_tells_of_something_else_is_refused(lane, engine, volume, field, value):
    header = np.frombuffer(bytearray(volume.read(0, 5, SLOT_BYTES)[:4096]), dtype=SLOT_DTYPE)
    header[field] = value
    seal(header)
    volume.write(0, 5, SLOT_BYTES, header.tobytes())
    _restore(lane, engine, {5}, Reason.HEADER_MISMATCH)


def test_slots_swapped_on_disk_are_noticed(lane, engine, volume):
    first, second = volume.read(0, 1, SLOT_BYTES), volume.read(0, 6, SLOT_BYTES)
    volume.write(0, 1, SLOT_BYTES, second)
    volume.write(0, 6, SLOT_BYTES, first)
    _restore(lane, engine, {1, 6}, Reason.HEADER_MISMATCH)


def test_a_bad_block_is_not_prefetched_either(lane, mover, volume, arena):
    volume.flip(0, 5, SLOT_BYTES, 4096 + 7000)
    volume.flip(0, 2, SLOT_BYTES, 40)
    records = make_records(range(8), 20000, arena_step=align_up(20000, 4096))
    want = [0, 0, Reason.HEADER_MISMATCH, 0, 0, Reason.CHECKSUM_MISMATCH, 0, 0]
    assert lane.run(Operation.PREFETCH, records, SLOT_BYTES).reasons == want


def test_a_byte_that_changed_in_the_arena_is_not_restored(mover, engine, arena):
    lane = mover.add_lane(number=9)
    step = align_up(20000, 4096)
    evicted = lane.run(Operation.ARENA_EVICT, make_records(range(8), 20000, arena_step=step), 0)
    arena[4 * step + 19999] ^= 1
    before = engine.snapshot()
    records = make_records(range(8, 16), 20000, arena_step=step, checksum=evicted.checksums)
    assert lane.run(Operation.ARENA_RESTORE, _renumber(records[4:5]), 0).reasons == [Reason.CHECKSUM_MISMATCH]
    assert engine.snapshot() == before
    assert lane.run(Operation.ARENA_RESTORE, _renumber(records[4:5]), 0, verify=False).reasons == [0]
    assert engine.snapshot() != before


@pytest.mark.parametrize("damage", ["a bit", "two blocks swapped", "a block of zeros"])
def test_damage_among_arena_payloads_without_gaps_stops_its_blocks_and_no_others(mover, make_engine, arena, damage):
    """Payloads side by side are checked as one run first; what is wrong with the run must still be found, and only its blocks be stopped."""
    engine = make_engine(*plain(16, 4096))
    lane = mover.add_lane(number=9)
    evicted = lane.run(Operation.ARENA_EVICT, make_records(range(8), 4096, arena_step=4096), 0)
    want = [engine.read(index) for index in range(8)]
    before = [engine.read(8 + index) for index in range(8)]
    if damage == "a bit":
        arena[5 * 4096 + 4095] ^= 0x80
        bad = {5}
    elif damage == "two blocks swapped":
        second, sixth = bytes(arena[2 * 4096 : 3 * 4096]), bytes(arena[6 * 4096 : 7 * 4096])
        arena[2 * 4096 : 3 * 4096], arena[6 * 4096 : 7 * 4096] = sixth, second
        bad = {2, 6}
    else:
        arena[0:4096] = bytes(4096)
        bad = {0}
    records = make_records(range(8, 16), 4096, arena_step=4096, checksum=evicted.checksums)
    assert lane.run(Operation.ARENA_RESTORE, records, 0).reasons == [Reason.CHECKSUM_MISMATCH if index in bad else 0 for index in range(8)]
    for index in range(8):
        assert engine.read(8 + index) == (before[index] if index in bad else want[index])


LONG_BYTES = 17 * MIB + 100


@pytest.mark.parametrize(
    ("at", "reason"),
    [(40, Reason.HEADER_MISMATCH), (520, Reason.HEADER_MISMATCH), (4096 + 5, Reason.CHECKSUM_MISMATCH), (4096 + LONG_BYTES - 1, Reason.CHECKSUM_MISMATCH)],
)
def test_no_bad_chunk_of_a_long_block_is_handed_over(mover, volume, make_engine, at, reason):
    engine = make_engine(*plain(2, LONG_BYTES))
    lane = mover.add_lane(volume)
    slot_bytes = slot_bytes_for(LONG_BYTES)
    lane.run(Operation.EVICT, make_records([0], LONG_BYTES), slot_bytes)
    volume.flip(0, 0, slot_bytes, at)
    tail_before = engine.read(1)[16 * MIB :]
    assert lane.run(Operation.RESTORE, make_records([1], LONG_BYTES), slot_bytes).reasons == [reason]
    assert engine.read(1)[16 * MIB :] == tail_before
    assert lane.run(Operation.RESTORE, make_records([1], LONG_BYTES), slot_bytes, verify=False).reasons == [0]
    assert engine.read(1)[16 * MIB :] != tail_before


@pytest.mark.parametrize("operation", [Operation.EVICT, Operation.RESTORE, Operation.READ_ONLY, Operation.SPILL, Operation.PREFETCH])
def test_an_expired_deadline_starts_no_io(lane, engine, volume, arena, operation):
    before, on_disk = engine.snapshot(), volume.read(0, 0, 16 * SLOT_BYTES)
    records = make_records(range(8, 16), 20000, generation=4, arena_step=align_up(20000, 4096))
    outcome = lane.run(operation, records, SLOT_BYTES, deadline_ns=time.monotonic_ns())
    assert outcome.reasons == [Reason.DEADLINE] * 8 and outcome.copied == 0
    assert sum(done.io_bytes + done.io_ns + done.payload_bytes for done in outcome.done) == 0
    assert engine.snapshot() == before and volume.read(0, 0, 16 * SLOT_BYTES) == on_disk


def test_a_volume_that_became_shorter_gives_short_io(lane, engine, volume):
    os.truncate(volume.path, volume.offset(0, 0, SLOT_BYTES))
    _restore(lane, engine, set(range(8)), Reason.SHORT_IO)


def test_a_failing_descriptor_gives_io_error_and_the_lane_lives_on(mover, volume, engine):
    data_fd = os.open(volume.path, os.O_RDONLY | os.O_DIRECT)
    os.dup2(data_fd, volume.fds[0])
    os.close(data_fd)
    lane = mover.add_lane(volume, threads=1)
    assert lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES).reasons == [Reason.IO_ERROR] * 8
    assert lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES, durable=True).reasons == [0] * 8


@pytest.mark.parametrize(
    "fields",
    [
        {"block_index": 16},
        {"block_index": 2**32 - 1},
        {"payload_bytes": 19999},
        {"slot": 1_000_000},
        {"slot": 2800},
        {"slab": 2},
        {"arena_offset": 4097},
        {"arena_offset": 95 * MIB + 1020 * 1024},
    ],
    ids=str,
)
def test_a_job_that_points_outside_moves_nothing_and_ends(mover, volume, engine, arena, fields):
    """The front has refused such a job; the mover trusts nobody."""
    before, on_disk = engine.snapshot(), volume.path.stat().st_size
    lane = mover.add_lane(volume, threads=1)
    records = make_records([3], **({"payload_bytes": 20000} | fields))
    operations = [Operation.PREFETCH, Operation.SPILL] if "arena_offset" in fields else [Operation.EVICT, Operation.RESTORE]
    for operation in operations:
        assert lane.run(operation, records, SLOT_BYTES, verify=False).reasons == [Reason.IO_ERROR]
    assert engine.snapshot() == before and volume.path.stat().st_size == on_disk and not any(volume.read(0, 0, 4 * SLOT_BYTES))
    if "slot" not in fields and "slab" not in fields:
        arena_lane = mover.add_lane(number=2)
        for operation in (Operation.ARENA_EVICT, Operation.ARENA_RESTORE):
            assert arena_lane.run(operation, records, 0, verify=False).reasons == [Reason.IO_ERROR]
        assert engine.snapshot() == before and not any(arena[:MIB])


def test_a_region_outside_its_memfd_is_refused_and_nothing_changes(mover, make_engine):
    engine = Engine(*plain(16, 20000))
    short_layout, _ = plain(17, 20000)
    answer = mover.map_region(engine, 1, layout=short_layout)
    assert isinstance(answer, NotMapped) and "340000" in answer.error and "320000" in answer.error
    answer = mover.map_region(engine, 1, layout=short_layout, memory_bytes=(340000,))
    assert isinstance(answer, NotMapped) and "340000" in answer.error and "320000" in answer.error
    plain_fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain_fd, 320000)
    answer = mover.map_region(engine, 1, fds=[plain_fd])
    assert isinstance(answer, NotMapped) and "F_SEAL_SHRINK" in answer.error
    os.close(plain_fd)
    assert isinstance(mover.map_region(engine, 1, fds=engine.fds * 2), NotMapped)
    lane = mover.add_lane()
    assert lane.run(Operation.ARENA_EVICT, make_records([0], 20000), 0).reasons == [Reason.IO_ERROR]
    engine.close()
    make_engine()
