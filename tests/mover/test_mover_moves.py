"""What comes back is what went in, through a real process, for every layout and operation."""

import os
import time

import numpy as np
import pytest
from crc32c import crc32c

from offloadd.model.enums import Reason
from offloadd.model.region import Layout, Plane
from offloadd.model.slots import FLAG_KEEP
from offloadd.mover.messages import Operation
from offloadd.tiers.format import slot_bytes_for
from offloadd.units import KIB, MIB, align_up

from .mover_harness import NONCE, UUID, make_records, plain


def _k_and_v_apart():
    return Layout(12, (Plane(0, 0, 8192, 8192), Plane(1, 0, 8192, 8192))), (12 * 8192, 12 * 8192)


def _per_layer_memories():
    return Layout(12, tuple(Plane(memory, half * 12 * 2048, 2048, 2048) for memory in range(6) for half in range(2))), (2 * 12 * 2048,) * 6


def _cross_layer():
    return Layout(12, tuple(Plane(0, layer * 4096, 10 * 4096, 4096) for layer in range(10))), (12 * 10 * 4096,)


def _interleaved_in_disorder():
    return Layout(12, tuple(Plane(0, 100 + place * 1000, 7500, 1000) for place in (3, 0, 6, 5, 1))), (12 * 7500 + 100,)


def _with_scales():
    return Layout(12, (Plane(0, 0, 9000, 9000), Plane(1, 64, 40, 36), Plane(0, 12 * 9000, 9000, 9000))), (24 * 9000, 12 * 40 + 64)


LAYOUTS = [_k_and_v_apart, _per_layer_memories, _cross_layer, _interleaved_in_disorder, _with_scales]
SOURCES = [0, 1, 2, 5, 4, 9]
TARGETS = [6, 7, 8, 3, 10, 11]


@pytest.mark.parametrize("make_layout", LAYOUTS, ids=lambda make: make.__name__.strip("_"))
def test_evicted_blocks_come_back_byte_for_byte_into_other_blocks(mover, volume, make_engine, make_layout):
    engine = make_engine(*make_layout())
    payload_bytes = engine.layout.payload_bytes
    slot_bytes = slot_bytes_for(payload_bytes)
    lane = mover.add_lane(volume)
    want = [engine.read(block) for block in SOURCES]
    before = [engine.read(block) for block in range(12)]
    evicted = lane.run(Operation.EVICT, make_records(SOURCES, payload_bytes), slot_bytes, durable=True, verify_target=1)
    assert evicted.reasons == [0] * 6 and evicted.copied == 6
    assert evicted.checksums == [crc32c(payload) for payload in want]
    assert [engine.read(block) for block in range(12)] == before
    restored = lane.run(Operation.RESTORE, make_records(TARGETS, payload_bytes), slot_bytes, verify_target=1)
    assert restored.reasons == [0] * 6 and restored.checksums == evicted.checksums
    for block in range(12):
        assert engine.read(block) == (want[TARGETS.index(block)] if block in TARGETS else before[block])


@pytest.mark.parametrize("make_layout", LAYOUTS, ids=lambda make: make.__name__.strip("_"))
def test_the_arena_gives_back_what_it_took(mover, make_engine, arena, make_layout):
    engine = make_engine(*make_layout())
    payload_bytes = engine.layout.payload_bytes
    step = align_up(payload_bytes, 4096)
    lane = mover.add_lane()
    want = [engine.read(block) for block in SOURCES]
    evicted = lane.run(Operation.ARENA_EVICT, make_records(SOURCES, payload_bytes, arena_step=step), 0, verify_target=1)
    # Where the copies bring the checksums with them, the slice is over when its sources are free: one message tells both.
    assert evicted.reasons == [0] * 6 and evicted.copied == (0 if mover.hello.copies_by.startswith("C ") else 6)
    assert [arena[at * step : at * step + payload_bytes] for at in range(6)] == want
    back = make_records(TARGETS, payload_bytes, arena_step=step, checksum=evicted.checksums)
    assert lane.run(Operation.ARENA_RESTORE, back, 0, verify_target=1).reasons == [0] * 6
    assert [engine.read(block) for block in TARGETS] == want


def test_a_block_longer_than_a_staging_slot_comes_back(mover, volume, make_engine, arena):
    payload_bytes = 20 * MIB + 1000
    engine = make_engine(*plain(3, payload_bytes))
    slot_bytes = slot_bytes_for(payload_bytes)
    lane = mover.add_lane(volume, staging=8 * MIB)
    want = engine.read(0)
    evicted = lane.run(Operation.EVICT, make_records([0], payload_bytes), slot_bytes, verify_target=1, durable=True)
    assert evicted.reasons == [0] and evicted.events == ["Copied", "SliceDone"] and evicted.checksums == [crc32c(want)]
    assert not any(volume.read(0, 0, slot_bytes)[4096 + payload_bytes :])
    restored = lane.run(Operation.RESTORE, make_records([2], payload_bytes), slot_bytes, verify_target=1)
    assert restored.reasons == [0] and restored.checksums == [crc32c(want)]
    assert engine.read(2) == want
    fetched = lane.run(Operation.PREFETCH, make_records([0], payload_bytes, arena_step=0, arena_first=8192), slot_bytes)
    assert fetched.reasons == [0] and fetched.checksums == [crc32c(want)]
    assert arena[8192 : 8192 + payload_bytes] == want
    record = make_records([0], payload_bytes, slots=[1], arena_step=0, arena_first=8192, checksum=fetched.checksums)
    assert lane.run(Operation.SPILL, record, slot_bytes).reasons == [0]
    assert lane.run(Operation.RESTORE, make_records([1], payload_bytes, slots=[1]), slot_bytes).reasons == [0]
    assert engine.read(1) == want
    assert lane.run(Operation.READ_ONLY, make_records([0], payload_bytes), slot_bytes).done[0].io_bytes == slot_bytes


def test_long_blocks_of_many_planes_are_cut_inside_planes(mover, volume, make_engine):
    # A chunk of 4 MiB begins and ends in the middle of a piece of 1000 * 1000 bytes.
    layout = Layout(2, tuple(Plane(0, plane * 1_000_000, 11_000_000, 1_000_000) for plane in (4, 0, 2, 6, 10, 9, 8, 7, 5)))
    engine = make_engine(layout, (22_000_000,))
    slot_bytes = slot_bytes_for(layout.payload_bytes)
    lane = mover.add_lane(volume)
    want = engine.read(1)
    assert lane.run(Operation.EVICT, make_records([1], layout.payload_bytes), slot_bytes, verify_target=1).reasons == [0]
    assert lane.run(Operation.RESTORE, make_records([0], layout.payload_bytes), slot_bytes, verify_target=1).reasons == [0]
    assert engine.read(0) == want and engine.read(1) == want


def test_spilled_blocks_are_restored_from_the_volume(mover, volume, make_engine, arena):
    engine = make_engine()
    step, slot_bytes = align_up(20000, 4096), slot_bytes_for(20000)
    arena_lane, lane = mover.add_lane(), mover.add_lane(volume, number=2)
    want = [engine.read(block) for block in range(8)]
    evicted = arena_lane.run(Operation.ARENA_EVICT, make_records(range(8), 20000, arena_step=step), 0)
    arena[20000:step] = b"\xff" * (step - 20000)
    records = make_records(range(8), 20000, arena_step=step, checksum=evicted.checksums)
    spilled = lane.run(Operation.SPILL, records, slot_bytes, durable=True)
    assert spilled.reasons == [0] * 8 and spilled.checksums == evicted.checksums
    assert not any(volume.read(0, 0, slot_bytes)[4096 + 20000 :])
    assert lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), slot_bytes).reasons == [0] * 8
    assert [engine.read(block) for block in range(8, 16)] == want


def test_a_block_whose_bytes_changed_in_the_arena_is_not_spilled(mover, volume, make_engine, arena):
    make_engine()
    step, slot_bytes = align_up(20000, 4096), slot_bytes_for(20000)
    arena_lane, lane = mover.add_lane(), mover.add_lane(volume, number=2, threads=1)
    evicted = arena_lane.run(Operation.ARENA_EVICT, make_records(range(8), 20000, arena_step=step), 0)
    arena[3 * step + 77] ^= 1
    records = make_records(range(8), 20000, arena_step=step, checksum=evicted.checksums)
    spilled = lane.run(Operation.SPILL, records, slot_bytes)
    assert spilled.reasons == [0, 0, 0, Reason.CHECKSUM_MISMATCH, 0, 0, 0, 0]
    assert not any(volume.read(0, 3, slot_bytes))
    assert lane.run(Operation.READ_ONLY, records, slot_bytes).reasons == [0] * 8
    restored = lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), slot_bytes)
    assert restored.reasons == [0, 0, 0, Reason.HEADER_MISMATCH, 0, 0, 0, 0]


def test_prefetched_blocks_are_restored_from_the_arena(mover, volume, make_engine, arena):
    engine = make_engine()
    step, slot_bytes = align_up(20000, 4096), slot_bytes_for(20000)
    arena_lane, lane = mover.add_lane(), mover.add_lane(volume, number=2)
    want = [engine.read(block) for block in range(8)]
    lane.run(Operation.EVICT, make_records(range(8), 20000), slot_bytes)
    fetched = lane.run(Operation.PREFETCH, make_records(range(8), 20000, arena_step=step), slot_bytes)
    assert fetched.reasons == [0] * 8 and fetched.checksums == [crc32c(payload) for payload in want]
    records = make_records(range(8, 16), 20000, arena_step=step, checksum=fetched.checksums)
    assert arena_lane.run(Operation.ARENA_RESTORE, records, 0).reasons == [0] * 8
    assert [engine.read(block) for block in range(8, 16)] == want


def test_blocks_of_two_regions_travel_in_one_job(mover, volume, make_engine, arena):
    first, second = make_engine(number=1, seed=1), make_engine(*plain(16, 19000), number=2, seed=2)
    regions, sizes = [1, 2, 1, 2, 2, 1], [20000, 19000, 20000, 19000, 19000, 20000]
    lane = mover.add_lane(volume, threads=2)
    slot_bytes = slot_bytes_for(20000)
    assert lane.run(Operation.EVICT, make_records(range(6), sizes, region=regions), slot_bytes, verify_target=1).reasons == [0] * 6
    assert lane.run(Operation.RESTORE, make_records(range(6, 12), sizes, region=regions), slot_bytes, verify_target=1).reasons == [0] * 6
    for index, region in enumerate(regions):
        engine = first if region == 1 else second
        assert engine.read(index + 6) == engine.read(index)


def test_the_header_on_disk_tells_everything_about_the_block(mover, volume, make_engine):
    engine = make_engine()
    lane = mover.add_lane(volume)
    records = make_records([4], 20000, slots=[9], slab=1, flags=FLAG_KEEP)
    lane.run(Operation.EVICT, records, slot_bytes_for(20000))
    header = volume.header(1, 9, slot_bytes_for(20000))
    for name in ("key", "slab", "slot", "generation", "namespace_ordinal", "namespace_epoch", "sequence", "payload_bytes", "flags"):
        assert header[name] == records[name][0], name
    assert header["nonce"].tobytes() == NONCE and header["volume_uuid"].tobytes() == UUID
    assert header["checksum"] == crc32c(engine.read(4))
    assert abs(int(header["written_ns"]) - time.time_ns()) < 600e9


def test_padding_on_disk_is_zero_after_a_longer_payload(mover, volume, make_engine):
    # Both payloads belong into slots of 24 KiB; the longer one leaves its tail in the staging slot and on the disk.
    make_engine(*plain(4, 20480), number=1)
    make_engine(*plain(4, 16400), number=2, seed=2)
    lane = mover.add_lane(volume, threads=1)
    lane.run(Operation.EVICT, make_records(range(4), 20480), 24 * KIB)
    assert any(volume.read(0, 2, 24 * KIB)[4096 + 16400 :])
    lane.run(Operation.EVICT, make_records(range(4), 16400, region=2), 24 * KIB)
    for slot in range(4):
        assert not any(volume.read(0, slot, 24 * KIB)[4096 + 16400 :])


def test_sources_are_reported_copied_before_the_slice_is_done(mover, volume, make_engine):
    make_engine()
    lane = mover.add_lane(volume, threads=1)
    outcome = lane.run(Operation.EVICT, make_records(range(8), 20000), slot_bytes_for(20000), durable=True)
    assert outcome.events == ["Copied", "SliceDone"] and outcome.copied == 8


def test_times_and_byte_counts_are_reported(mover, volume, make_engine):
    make_engine()
    lane = mover.add_lane(volume, threads=1)
    done = lane.run(Operation.EVICT, make_records(range(8), 20000), slot_bytes_for(20000), submitted_ns=time.monotonic_ns()).done[0]
    assert done.payload_bytes == 8 * 20000 and done.io_bytes == 8 * slot_bytes_for(20000)
    assert min(done.queue_ns, done.copy_ns, done.checksum_ns, done.io_ns) > 0


def test_null_jobs_are_answered_without_a_region_or_a_volume(mover):
    lane = mover.add_lane()
    outcome = lane.run(Operation.NULL, make_records(range(700), 1), 0)
    assert outcome.reasons == [0] * 700 and len(outcome.done) == 1


def test_many_jobs_at_once_all_end(mover, volume, make_engine):
    engine = make_engine()
    lane = mover.add_lane(volume)
    slot_bytes = slot_bytes_for(20000)
    want = [engine.read(block) for block in range(16)]
    lane.run(Operation.EVICT, make_records(range(16), 20000), slot_bytes)
    for mapped in engine.maps:
        mapped[:] = bytes(len(mapped))
    for block in range(16):
        lane.submit(Operation.RESTORE, make_records([block], 20000, slots=[block]), slot_bytes)
    ended = set()
    while len(ended) < 16:
        message, _ = lane.channel.receive()
        assert np.frombuffer(message.results, dtype="<u4")[1] == 0
        ended.add(message.job)
    assert [engine.read(block) for block in range(16)] == want


def test_the_mover_ends_with_its_control_socket(mover):
    assert mover.hello.pid == mover.process.pid and mover.hello.paths == ("host", "ddr")
    os.kill(mover.process.pid, 2)
    lane = mover.add_lane()
    assert lane.run(Operation.NULL, make_records([0], 1), 0).reasons == [0]
