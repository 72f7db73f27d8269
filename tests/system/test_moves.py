"""Evict and restore through the real daemon: every layout, tier and acknowledgement, byte for byte."""

import os
from collections.abc import Callable

import pytest

from offloadd.client import AckLevel, Client, EvictStatus, Namespace, Path, Reason, RestoreStatus, Shard, ShardName, Tier
from offloadd.errors import PathUnavailable
from offloadd.units import GIB, KIB, MIB

from .daemon_process import DaemonProcess
from .engine_memory import SHAPES, Engine, flat

WAYS = {
    "arena": ({"ack": AckLevel.COPIED, "tier": Tier.ARENA}, (Tier.ARENA, Path.DDR)),
    "volume, durable": ({"ack": AckLevel.DURABLE, "tier": Tier.VOLUME}, (Tier.VOLUME, Path.HOST)),
    "volume, copied, straight": ({"ack": AckLevel.COPIED, "tier": Tier.VOLUME, "path": Path.HOST, "require_path": True}, (Tier.VOLUME, Path.HOST)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_come_back_byte_for_byte_into_other_places(client: Client, shape: str, way: str) -> None:
    options, expected_way = WAYS[way]
    engine = Engine(client, SHAPES[shape])
    count = engine.shape.block_count // 2
    names = [f"block {number}" for number in range(count)]
    answer = engine.evict(range(count), names, **options)
    assert [outcome.status for outcome in answer.outcomes] == [EvictStatus.STORED] * count
    payload_bytes = sum(plane.block_bytes for plane in engine.shape.planes)
    assert [(use.tier, use.path, use.block_count, use.payload_bytes) for use in answer.paths] == [(*expected_way, count, count * payload_bytes)]
    engine.wipe()
    targets = [engine.shape.block_count - 1 - number for number in range(count)]
    restored = engine.restore(targets, names)
    assert [outcome.status for outcome in restored.outcomes] == [RestoreStatus.RESTORED] * count
    assert [(use.tier, use.path, use.payload_bytes) for use in restored.paths] == [(*expected_way, count * payload_bytes)]
    for target, name in zip(targets, names, strict=True):
        assert engine.holds(target, name), f"block {target} has other bytes"
    # Nothing beside the destinations changed: the sources still hold the wipe's bytes, and so do the gaps.
    engine_bytes = [array.copy() for array in engine.bytes]
    for target in targets:
        for view in engine.views(target):
            view[:] = 0xA5
    assert all((array == 0xA5).all() for array in engine.bytes), "bytes outside the destinations were written"
    del engine_bytes


def test_outcomes_stream_in_order_and_the_last_part_tells_ways_and_times(client: Client) -> None:
    engine = Engine(client, flat(64, 512 * KIB))
    names = [str(number) for number in range(64)]
    engine.evict(range(64), names, ack=AckLevel.DURABLE)
    engine.wipe()
    seen = 0
    for part in client.restore_stream(engine.blocks(range(64), names)):
        assert part.first_position == seen
        for position in range(seen, seen + len(part.outcomes)):
            assert part.outcomes[position - seen].restored
            assert engine.holds(position, names[position]), "an outcome came before its bytes"
        seen += len(part.outcomes)
        last = part
    assert seen == 64
    assert last.times is not None and last.times.total_s > 0 and last.times.io_s > 0 and last.times.checksum_s > 0
    assert sum(use.payload_bytes for use in last.paths) == 64 * 512 * KIB
    assert sum(use.io_bytes for use in last.paths) == 64 * (512 * KIB + 4096)


def test_missing_blocks_are_outcomes_between_restored_ones(client: Client) -> None:
    engine = Engine(client, flat(8, 8 * KIB))
    engine.evict([0, 1, 2], ["a", "b", "c"])
    restored = engine.restore([3, 4, 5, 6], ["a", "nobody", "c", "no one"])
    assert [outcome.status for outcome in restored.outcomes] == [
        RestoreStatus.RESTORED,
        RestoreStatus.NOT_FOUND,
        RestoreStatus.RESTORED,
        RestoreStatus.NOT_FOUND,
    ]


def test_a_second_evict_of_the_same_key_is_a_duplicate_and_moves_nothing(client: Client) -> None:
    engine = Engine(client, flat(8, 8 * KIB))
    engine.evict([0], ["a"], ack=AckLevel.DURABLE)
    again = engine.evict([0], ["a"], ack=AckLevel.DURABLE)
    assert [(outcome.status, outcome.tier) for outcome in again.outcomes] == [(EvictStatus.DUPLICATE, Tier.VOLUME)]
    assert again.paths == ()


def test_a_copied_evict_is_spilled_and_prefetched_back(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(32, 256 * KIB))
    names = [str(number) for number in range(16)]
    answer = engine.evict(range(16), names)
    assert {use.tier for use in answer.paths} == {Tier.ARENA}
    daemon.wait_until(lambda: daemon.counters().get("spilled_blocks") == 16, "the spill")
    daemon.restart()
    lookup = client.lookup([engine.region], engine.blocks(range(16), names).hashes)
    assert lookup.held_count == 16 and set(lookup.tiers) == {Tier.VOLUME}
    assert client.prefetch([engine.region], engine.blocks(range(16), names).hashes).queued_count == 16
    daemon.wait_until(lambda: daemon.counters().get("prefetched_blocks") == 16, "the prefetch")
    engine.wipe()
    restored = engine.restore(range(16, 32), names)
    assert {use.tier for use in restored.paths} == {Tier.ARENA}
    assert all(engine.holds(16 + number, name) for number, name in enumerate(names))


def test_what_is_over_a_volumes_write_budget_is_rejected_and_not_spilled_and_told(make_daemon: Callable[..., DaemonProcess]) -> None:
    # A 24th of it, 43 MiB, may be written at once.
    daemon = make_daemon(volume_keys={"write_bytes_per_day_max": GIB})
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        answer = engine.evict(range(60), [str(number) for number in range(60)], ack=AckLevel.DURABLE)
        stored = answer.stored_count
        assert 40 <= stored < 60
        refused = {(outcome.status, outcome.reason) for outcome in answer.outcomes if outcome.status != EvictStatus.STORED}
        assert refused == {(EvictStatus.REJECTED, Reason.WRITE_BUDGET)}
        assert daemon.counters()['offloadd_not_stored_total{outcome="rejected",reason="write_budget"}'] == 60 - stored
        assert engine.evict(range(60, 64), ["a", "b", "c", "d"]).all_stored, "the arena takes them"
        daemon.wait_until(lambda: daemon.counters().get("spill_blocks_failed_write_budget", 0) > 0, "a spill that is left out")
        assert engine.restore(range(4), ["a", "b", "c", "d"]).restored_count == 4


def test_several_volumes_share_one_request(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=3)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(48, 128 * KIB))
        names = [str(number) for number in range(48)]
        # Registering the region had a slab cut on each volume; while one is still being cut the others take its share.
        daemon.wait_until(lambda: all(volume.open_count == 1 for volume in daemon.status().volumes), "the first cuts")
        assert engine.evict(range(48), names, ack=AckLevel.DURABLE).all_stored
        shares = [volume.block_count for volume in daemon.status().volumes]
        assert shares == [16, 16, 16]
        engine.wipe()
        assert engine.restore(range(48), names).restored_count == 48
        assert all(engine.holds(number, name) for number, name in enumerate(names))


def test_a_full_arena_makes_room_by_reclaiming_what_is_not_kept(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=0, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        kept = [f"kept {number}" for number in range(8)]
        assert engine.evict(range(8), kept, keep=True).all_stored
        for round_number in range(4):
            names = [f"{round_number}/{number}" for number in range(8)]
            assert engine.evict(range(8, 16), names).all_stored
        assert engine.restore(range(32, 40), kept).restored_count == 8
        assert engine.restore(range(40, 48), [f"0/{number}" for number in range(8)]).restored_count == 0


def test_a_tier_full_of_kept_blocks_rejects_and_takes_again_after_release(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=0, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        kept = [f"kept {number}" for number in range(16)]
        assert engine.evict(range(16), kept, keep=True).all_stored
        refused = engine.evict([20], ["new"])
        assert [(outcome.status.name, outcome.reason.name) for outcome in refused.outcomes] == [("REJECTED", "TIER_FULL")]
        assert client.release([engine.region], engine.blocks(range(4), kept[:4]).hashes) == 4
        assert engine.evict([20], ["new"]).all_stored
        assert engine.restore(range(32, 44), kept[4:]).restored_count == 12


def test_a_consumed_block_is_kept_no_longer(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=0, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        kept = [f"kept {number}" for number in range(16)]
        engine.evict(range(16), kept, keep=True)
        assert daemon.status().held_count == 16
        assert engine.restore(range(16, 24), kept[:8], consume=True).restored_count == 8
        assert daemon.status().held_count == 8
        assert engine.evict(range(8), [f"new {number}" for number in range(8)]).all_stored


def test_an_expired_keep_ends(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=0, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(8, 1 * MIB))
        engine.evict([0], ["a"], keep=True, keep_ttl_s=0.5)
        assert daemon.status().held_count == 1
        daemon.wait_until(lambda: daemon.status().held_count == 0, "the end of the keep")


def test_a_full_volume_is_cut_anew_for_another_model(daemon: DaemonProcess, client: Client) -> None:
    old = Engine(client, flat(40, 1 * MIB))
    for round_number in range(4):
        names = [f"old {round_number}/{number}" for number in range(40)]
        assert old.evict(range(40), names, ack=AckLevel.DURABLE).all_stored
    new = Engine(client, flat(64, 300 * KIB), namespace=Namespace(model="new", weights="commit-2"))
    for round_number in range(3):
        names = [f"new {round_number}/{number}" for number in range(64)]
        assert new.evict(range(64), names, ack=AckLevel.DURABLE).all_stored
    new.wipe()
    for round_number in range(3):
        names = [f"new {round_number}/{number}" for number in range(64)]
        assert new.restore(range(64), names).restored_count == 64
        assert all(new.holds(number, name) for number, name in enumerate(names))


def test_copied_overflows_into_the_arena_while_the_volume_can_not_take_it(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_bytes=32 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        filling = [f"kept {number}" for number in range(14)]
        engine.evict(range(14), filling, ack=AckLevel.DURABLE, keep=True)
        answer = engine.evict(range(20, 40), [f"more {number}" for number in range(20)], tier=Tier.VOLUME)
        assert answer.all_stored
        engine.wipe()
        assert engine.restore(range(20), [f"more {number}" for number in range(20)]).restored_count == 20


def test_cache_groups_of_one_instance_share_requests_but_not_keys(client: Client) -> None:
    attention = Engine(client, SHAPES["layers apart"], cache_group=0)
    state = Engine(client, flat(12, 7_777), cache_group=1)
    attention.fill(0, "x")
    state.fill(0, "x")
    spans = [attention.blocks([0], ["x"]), state.blocks([0], ["x"])]
    assert client.evict(spans, ack=AckLevel.DURABLE).all_stored
    assert client.lookup([attention.region, state.region], spans[0].hashes).held_count == 1
    targets = [attention.blocks([5], ["x"]), state.blocks([6], ["x"])]
    assert client.restore(targets).restored_count == 2
    assert attention.holds(5, "x") and state.holds(6, "x")


def test_a_prefix_ends_where_one_shard_ends(client: Client) -> None:
    shards = [Namespace(model="m", weights="w", shard=Shard(head_start=rank, head_count=1)) for rank in range(2)]
    engines = [Engine(client, flat(16, 4 * KIB), namespace=shard) for shard in shards]
    names = [str(number) for number in range(10)]
    engines[0].evict(range(10), names)
    engines[1].evict(range(6), names[:6])
    hashes = engines[0].blocks(range(10), names).hashes
    by_region = client.lookup([engine.region for engine in engines], hashes)
    by_name = client.lookup([ShardName(shard) for shard in shards], hashes)
    assert by_region.held_count == by_name.held_count == 6
    assert client.lookup([engines[0].region], hashes).held_count == 10


def test_another_namespace_never_sees_the_block(client: Client) -> None:
    engine = Engine(client, flat(8, 4 * KIB))
    other = Engine(client, flat(8, 4 * KIB), namespace=Namespace(model="test", weights="commit-2", engine="test"))
    engine.evict([0], ["a"])
    assert other.restore([1], ["a"]).outcomes[0].status == RestoreStatus.NOT_FOUND
    assert client.lookup([other.region], other.blocks([0], ["a"]).hashes).held_count == 0


def test_a_dropped_namespace_is_gone_also_after_a_restart(daemon: DaemonProcess, client: Client) -> None:
    from offloadd.client import AdminClient

    engine = Engine(client, flat(8, 4 * KIB))
    engine.evict(range(8), list("abcdefgh"), ack=AckLevel.DURABLE)
    with AdminClient(daemon.runtime_dir) as admin:
        assert admin.drop_namespace(engine.region.namespace_id) == 8
    assert engine.restore([0], ["a"]).outcomes[0].status == RestoreStatus.NOT_FOUND
    daemon.restart()
    assert engine.restore([0], ["a"]).outcomes[0].status == RestoreStatus.NOT_FOUND
    # Entered again by the new registration: new blocks live, old ones stay dead.
    assert engine.evict([1], ["z"], ack=AckLevel.DURABLE).all_stored
    assert engine.restore([2], ["z"]).restored_count == 1


def test_a_volume_full_of_kept_blocks_rejects_and_loses_none(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_bytes=36 * MIB, arena_bytes=0)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        kept = [f"kept {number}" for number in range(40)]
        answer = engine.evict(range(40), kept, ack=AckLevel.DURABLE, keep=True)
        stored = [name for name, outcome in zip(kept, answer.outcomes, strict=True) if outcome.stored]
        assert 0 < len(stored) < 40
        assert {(outcome.status.name, outcome.reason.name) for outcome in answer.outcomes if not outcome.stored} == {("REJECTED", "TIER_FULL")}
        again = engine.evict([50], ["one more"], ack=AckLevel.DURABLE)
        assert [(outcome.status.name, outcome.reason.name) for outcome in again.outcomes] == [("REJECTED", "TIER_FULL")]
        engine.wipe()
        assert engine.restore(range(len(stored)), stored).restored_count == len(stored)
        assert all(engine.holds(number, name) for number, name in enumerate(stored))
        assert client.release_all() == len(stored)
        assert engine.evict([50], ["one more"], ack=AckLevel.DURABLE).all_stored


def test_keeps_belong_to_the_instance_and_end_with_its_last_process(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=0, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="tp2", process="scheduler") as scheduler:
        with Client.connect(daemon.runtime_dir, instance="tp2", process="worker 0") as worker:
            engine = Engine(worker, flat(8, 1 * MIB))
            assert engine.evict(range(4), list("abcd"), keep=True).all_stored
            hashes = engine.blocks(range(4), list("abcd")).hashes
        # The worker is gone; its instance lives on in the scheduler, which can release what the worker kept.
        daemon.wait_until(lambda: len(daemon.status().sessions) == 1, "the worker's end")
        assert daemon.status().held_count == 4
        shard = ShardName(engine.namespace)
        assert scheduler.lookup([shard], hashes).held_count == 4
        assert scheduler.release([shard], hashes[:1]) == 1
        assert daemon.status().held_count == 3
    daemon.wait_until(lambda: daemon.status().held_count == 0, "the end of the keeps")


def test_a_required_path_is_taken_or_the_request_fails(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        engine.evict([0, 1], ["arena", "arena too"], tier=Tier.ARENA)
        engine.evict([2], ["volume"], ack=AckLevel.DURABLE)
        with pytest.raises(PathUnavailable, match="path host is not available for 2 of 3 blocks: they are only in the arena"):
            engine.restore([10, 11, 12], ["arena", "arena too", "volume"], path=Path.HOST, require_path=True)
        with pytest.raises(PathUnavailable, match="path ddr is not available for 1 of 1 blocks: they are only on a volume"):
            engine.restore([10], ["volume"], path=Path.DDR, require_path=True)
        # Nothing stayed pinned: as a wish the same request works, and the answer tells the ways.
        mixed = engine.restore([10, 11, 12], ["arena", "arena too", "volume"], path=Path.HOST)
        assert {(use.path, use.block_count) for use in mixed.paths} == {(Path.DDR, 2), (Path.HOST, 1)}
        # The arena holds 16 blocks of which none may be reclaimed: an evict that must go by ddr is rejected rather than sent to the volume.
        engine.evict(range(16), [f"kept {number}" for number in range(16)], tier=Tier.ARENA, keep=True)
        refused = engine.evict([20], ["new"], path=Path.DDR, require_path=True)
        assert [(outcome.status.name, outcome.reason.name) for outcome in refused.outcomes] == [("REJECTED", "TIER_FULL")]
        assert {use.path for use in engine.evict([20], ["new"], path=Path.DDR).paths} == {Path.HOST}


def test_a_copy_that_rotted_in_one_tier_is_replaced_by_the_other(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict([0], ["a"])
    daemon.wait_until(lambda: daemon.counters().get("spilled_blocks") == 1, "the spill")
    content = daemon.volumes[0].read_bytes()
    offset = content.index(engine.views(0)[0].tobytes())
    with daemon.volumes[0].open("r+b") as file:
        file.seek(offset + 5)
        file.write(bytes([content[offset + 5] ^ 0x80]))
        file.flush()
        os.fsync(file.fileno())
    restored = engine.restore([1], ["a"], path=Path.HOST)
    assert restored.restored_count == 1 and engine.holds(1, "a")
    assert [(use.path, use.block_count) for use in restored.paths] == [(Path.DDR, 1)]
    assert daemon.counters()["copies_lost"] == 1


@pytest.mark.parametrize("options", [{"tier": Tier.ARENA}, {"ack": AckLevel.DURABLE}], ids=["arena", "durable"])
def test_a_request_of_more_blocks_than_one_reservation_stores_them_all(make_daemon: Callable[..., DaemonProcess], options: dict[str, object]) -> None:
    daemon = make_daemon(volume_count=2)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(3000, 4 * KIB))
        names = [str(number) for number in range(1500)]
        answer = engine.evict(range(1500), names, **options)  # type: ignore[arg-type]
        assert answer.all_stored and sum(use.block_count for use in answer.paths) == 1500
        engine.wipe()
        assert engine.restore(range(1500, 3000), names).restored_count == 1500
        assert all(engine.holds(1500 + number, name) for number, name in enumerate(names))
