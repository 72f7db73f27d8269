"""A volume that hangs or fails costs itself only, and comes back. The test is the mover of two volumes and holds the clock."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offloadd import clock
from offloadd.catalog.pool import Pool
from offloadd.catalog.reservation import Reservation, Shortage
from offloadd.errors import Unavailable, VolumeError
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import AckLevel, EvictStatus, Path, Reason, RestoreStatus, Tier
from offloadd.model.requests import EvictOptions, RestoreOptions
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Job, Operation, Parked, SliceDone, Unparked
from offloadd.offload.devices import Device
from offloadd.offload.lanes import Lane
from offloadd.offload.lookup import Lookups
from offloadd.offload.volume_health import HealthOptions, VolumeHealth
from offloadd.offload.volume_watch import VolumeWatch
from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.breaker import BreakerState
from offloadd.scheduler.job_class import VOLUME_PRECEDENCE
from offloadd.scheduler.lane_queue import LaneQueue, Windows

from .test_moves_in_order import BLOCK_BYTES, Front, settle

OPTIONS = HealthOptions()
SLOT_BYTES = 8192


class Clock:
    """The true time, and what the test adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real_ns = clock.monotonic_ns
        monkeypatch.setattr(clock, "monotonic_ns", lambda: real_ns() + int(self.ahead_s * 1e9))
        monkeypatch.setattr(clock, "monotonic_s", lambda: clock.monotonic_ns() / 1e9)


class Volume:
    """A link whose keeper prepares every slab at once, and answers probes when the test says how."""

    serving, scanning, opened, slab_failures, nvme_paths = True, False, True, 0, "none"

    def __init__(self, front: "TwoVolumes", path: str) -> None:
        self.options = SimpleNamespace(path=path)
        self._catalog = front.core.catalog
        self.ordinal = self._catalog.add_volume(slab_count=2, slot_count_for=lambda slot_bytes: 16, open_slabs_max=2)
        self.turned = asyncio.Event()

        def on_turn() -> None:
            front.watch.turned(self)  # type: ignore[arg-type]
            self.turned.set()

        self.health = VolumeHealth(OPTIONS, on_turn)
        self.slabs_changed = asyncio.Event()
        self.probes: list[asyncio.Future[None]] = []

    @property
    def pool(self) -> Pool:
        return self._catalog.volumes[self.ordinal]

    def nonce(self, slab: int) -> bytes:
        return b"n" * 16

    def grant_wishes(self) -> None:
        for wish in self.pool.take_wishes():
            self.pool.ready(wish.slab, b"n" * 16)
            self.wake()

    def wake(self) -> None:
        changed, self.slabs_changed = self.slabs_changed, asyncio.Event()
        changed.set()

    async def probe(self) -> None:
        self.probes.append(asyncio.get_running_loop().create_future())
        await self.probes[-1]


class TwoVolumes(Front):
    """`ends`: the test's ends of the volumes' lanes."""

    def __init__(self, held: Clock) -> None:
        super().__init__()
        self.clock = held
        self.admitted: list[int] = []
        self.watch = VolumeWatch(self.core, lambda volume: self.admitted.append(volume.ordinal))
        self.volumes = [Volume(self, f"/{name}") for name in "ab"]
        self.core.volumes += self.volumes  # type: ignore[arg-type]
        self.ends: list[Channel[Job]] = []
        self.lanes = [self.add_lane(self.device, volume) for volume in self.volumes]
        for volume in self.volumes:
            self.region.namespace.on_volumes[volume.ordinal] = (volume.ordinal, 1)
        self.lookups = Lookups(self.core)

    def add_lane(self, device: Device, volume: Volume, path: Path = Path.HOST) -> Lane:
        ours, theirs = socket_pair()
        theirs.setblocking(False)
        self.ends.append(Channel(theirs, Job))
        windows = Windows(
            restore_bytes_in_flight=2 * SLOT_BYTES,
            evict_bytes_in_flight=8 * SLOT_BYTES,
            restore_job_bytes=SLOT_BYTES,
            evict_job_bytes=8 * SLOT_BYTES,
            first_bytes=SLOT_BYTES,
            quantum_bytes=8 * SLOT_BYTES,
            blocks_max=1000,
        )
        arbiter = Arbiter(VOLUME_PRECEDENCE, slice_bytes=8 * SLOT_BYTES, bytes_in_flight=16 * SLOT_BYTES)
        lane = Lane(
            number=1 + volume.ordinal,
            name=volume.options.path,
            tier=Tier.VOLUME,
            path=path,
            queue=LaneQueue(arbiter, windows),
            device=device.name,
            volume=volume.ordinal,
            on_io=volume.health.on_io,
            on_left=self.watch.left_behind,
        )
        lane.connect(ours)
        device.volume_lanes[volume.ordinal, path] = lane
        return lane

    async def job_on(self, volume: int) -> Job:
        """The next job that is sent to the volume."""
        self.lane, arena = self.ends[volume], self.lane
        try:
            async with asyncio.timeout(60):
                return await self.job()
        finally:
            self.lane = arena

    def no_job_on(self, volume: int) -> bool:
        self.lane, arena = self.ends[volume], self.lane
        try:
            return self.no_job()
        finally:
            self.lane = arena

    def done_on(self, volume: int, job: Job, reason: Reason = Reason.NONE) -> None:
        """The volume did it, or every block of it failed."""
        results = np.zeros(len(job.blocks) // BLOCK_DTYPE.itemsize, dtype=RESULT_DTYPE)
        results["position"] = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)["position"]
        results["reason"] = reason
        size = 0 if reason else BLOCK_BYTES * len(results)
        done = SliceDone(job=job.job, results=results.tobytes(), queue_ns=1, copy_ns=1, checksum_ns=1, io_ns=1, payload_bytes=size, io_bytes=size)
        self.ends[volume].send(done)

    def evict_to(self, first: int, names: str, *, tier: Tier = Tier.ANY, ack: AckLevel = AckLevel.COPIED) -> "asyncio.Task[Any]":
        options = EvictOptions(deadline_s=clock.monotonic_s() + 600, tier=tier, ack=ack)
        return asyncio.create_task(self.evictor.evict(self.session, [self.batch(first, names)], options))

    async def store_on(self, volume: int, names: str) -> None:
        """Durable blocks on this volume."""
        other = self.volumes[1 - volume]
        other.serving = False  # type: ignore[misc]
        evict = self.evict_to(0, names, ack=AckLevel.DURABLE)
        self.done_on(volume, await self.job_on(volume))
        assert set((await evict).status.tolist()) == {EvictStatus.STORED}
        other.serving = True  # type: ignore[misc]

    async def stand_still(self, volume: int) -> None:
        """What is in flight there does not move, for longer than any I/O may take; until the volume is turned off."""
        self.clock.ahead_s += OPTIONS.late_s + 1
        self.watch.look(self.volumes[volume])  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await self.volumes[volume].turned.wait()
        assert not self.volumes[volume].health.reads.admits

    def rows(self, names: str) -> Any:
        return self.core.catalog.lookup(self.batch(0, names).keys)

    def pins(self, names: str) -> list[int]:
        return self.core.catalog._pins[self.rows(names)].tolist()

    async def held(self, names: str) -> int:
        keys = [self.batch(0, names).keys]
        return self.lookups.lookup(self.session, keys, prefix=True, lease_until_s=None, prefill_tokens_per_s=0, tokens_per_block=0).held_count


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoVolumes]:
    monkeypatch.setattr("offloadd.offload.volume_watch.MOVER_WAIT_S", 0.02)
    made = TwoVolumes(Clock(monkeypatch))
    yield made
    made.core.catalog.check()
    made.watch.stop()
    for lane in (*made.lanes, made.device.arena_lane):
        lane.disconnect()  # type: ignore[union-attr]
    for end in (*made.ends, made.lane):
        end.close()


async def test_incident_13_requests_that_wait_for_a_volume_that_hangs_are_answered_when_that_is_known(front: TwoVolumes) -> None:
    await front.store_on(0, "abcd")
    restore = front.restore(8, "abcd", deadline_s=10_000)
    sent = [await front.job_on(0), await front.job_on(0)]
    await settle()
    assert front.no_job_on(0) and not restore.done()
    await front.stand_still(0)
    answer = await restore
    assert answer.status.tolist() == [RestoreStatus.FAILED] * 4 and answer.reason.tolist() == [Reason.VOLUME_DOWN] * 4
    assert front.mover.fenced[-1] == sent[0].move and front.no_job_on(0)
    assert front.pins("abcd") == [1] * 4, "a slot that is being read was given away"
    for job in sent:
        front.done_on(0, job, Reason.CANCELLED)
    await settle()
    assert front.pins("abcd") == [0] * 4


async def test_incident_14_blocks_of_a_volume_that_is_off_fail_at_once_each_time_and_are_not_offered(front: TwoVolumes) -> None:
    await front.store_on(0, "ab")
    assert await front.held("ab") == 2
    front.volumes[0].health.stand_still(6)
    for _ in range(2):
        answer = await front.restore(8, "ab", deadline_s=10_000)
        assert answer.status.tolist() == [RestoreStatus.FAILED] * 2 and answer.reason.tolist() == [Reason.VOLUME_DOWN] * 2
    assert front.no_job_on(0) and await front.held("ab") == 0 and front.pins("ab") == [0, 0]
    front.clock.ahead_s += 10
    front.volumes[0].health.probed("")
    assert await front.held("ab") == 2
    restore = front.restore(8, "ab")
    for _ in range(2):
        front.done_on(0, await front.job_on(0))
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED] * 2


async def test_a_block_that_is_in_the_arena_too_is_restored_from_there_whatever_path_was_wished_for(front: TwoVolumes) -> None:
    evict = front.evict_to(0, "a")
    front.done(await front.job())
    await evict
    spill = await front.job_on(1)
    front.done_on(1, spill)
    await front.core.idle()
    front.volumes[1].health.stand_still(6)

    async def work() -> Any:
        options = RestoreOptions(deadline_s=clock.monotonic_s() + 600, path=Path.HOST)
        async for _, _, answer in front.restorer.restore(front.session, [front.batch(8, "a")], options):
            last = answer
        return last

    restore = asyncio.create_task(work())
    front.done(await front.job())
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED]


async def test_evicts_go_to_the_other_volume_and_without_one_to_the_arena_or_are_told_why(front: TwoVolumes) -> None:
    front.volumes[0].health.stand_still(6)
    for name in "ab":
        evict = front.evict_to(0, name, ack=AckLevel.DURABLE)
        front.done_on(1, await front.job_on(1))
        assert (await evict).status.tolist() == [EvictStatus.STORED]
    assert front.no_job_on(0)
    front.volumes[1].health.stand_still(6)
    refused = await front.evict_to(0, "c", ack=AckLevel.DURABLE)
    assert (refused.status.tolist(), refused.reason.tolist()) == ([EvictStatus.REJECTED], [Reason.VOLUME_DOWN])
    evict = front.evict_to(0, "c")
    front.done(await front.job())
    assert (await evict).status.tolist() == [EvictStatus.STORED]
    # What lies on a volume that is off can't be had back: the arena takes a copy, and it is restored from there.
    evict = front.evict_to(0, "a")
    front.done(await front.job())
    assert (await evict).status.tolist() == [EvictStatus.STORED] and await front.held("a") == 1


async def test_of_an_evict_over_both_volumes_the_half_that_was_written_is_stored_and_found_while_the_other_hangs(front: TwoVolumes) -> None:
    evict = front.evict_to(0, "abcdefgh", ack=AckLevel.DURABLE)
    late, written = await front.job_on(0), await front.job_on(1)
    front.done_on(1, written)
    await settle()
    waiting = front.restore(8, "abcdefgh", deadline_s=10_000)
    await settle()
    assert not evict.done() and not waiting.done()
    await front.stand_still(0)
    answer = await evict
    stored = answer.status == EvictStatus.STORED
    assert stored.sum() == 4 and set(answer.reason[~stored].tolist()) == {Reason.VOLUME_DOWN}
    # The restore that waited for the evict goes on: what was told as stored is read, the rest is not there.
    for _ in range(4):
        front.done_on(1, await front.job_on(1))
    restored = await waiting
    assert (restored.status == RestoreStatus.RESTORED).tolist() == stored.tolist()
    assert set(restored.status[~stored].tolist()) == {RestoreStatus.NOT_FOUND}
    front.done_on(0, late)
    await front.core.idle()
    assert ((front.rows("abcdefgh") > 0) == stored).all(), "what was answered as failed became visible when its write ended"
    assert not front.core.in_flight


async def test_incident_3_a_spill_to_a_volume_that_hangs_is_carried_to_the_other_and_what_was_sent_keeps_its_arena_slots(front: TwoVolumes) -> None:
    evict = front.evict_to(0, "abcd")
    front.done(await front.job())
    await evict
    late = await front.job_on(1)
    assert late.operation == Operation.SPILL and front.no_job_on(0)
    await front.stand_still(1)
    front.done_on(0, await front.job_on(0))
    await settle()
    assert front.core.counters["spilled_blocks"] == 4 and front.core.counters["spill_blocks_failed"] == 0
    assert front.pins("abcd") == [1] * 4, "an arena slot that a late write reads could be given away"
    assert front.core.catalog.volumes[1].reserved_count == 4, "a slot that a late write fills could be given away"
    front.done_on(1, late)
    await front.core.idle()
    assert front.pins("abcd") == [0] * 4 and front.core.catalog.volumes[1].reserved_count == 0
    restore = front.restore(8, "abcd")
    front.done(await front.job())
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED] * 4


async def test_a_spill_finds_the_volume_with_room_when_the_first_is_full(front: TwoVolumes) -> None:
    empty = np.zeros(0, dtype=np.uint32)
    front.volumes[1].pool.reserve = lambda *asked: Reservation(empty, empty, empty, empty, Shortage.FULL)  # type: ignore[method-assign]
    evict = front.evict_to(0, "ab")
    front.done(await front.job())
    await evict
    front.done_on(0, await front.job_on(0))
    await front.core.idle()
    assert front.core.counters["spilled_blocks"] == 2 and front.core.counters["spill_blocks_failed"] == 0
    front.volumes[0].serving = False  # type: ignore[misc]
    evict = front.evict_to(0, "cd")
    front.done(await front.job())
    await evict
    await front.core.idle()
    assert front.core.counters["spill_blocks_failed_tier_full"] == 2 and front.pins("cd") == [0, 0]


async def test_incident_22_a_spill_without_another_volume_is_given_up_and_counted_and_pins_nothing_that_was_not_sent(front: TwoVolumes) -> None:
    front.volumes[0].serving = False  # type: ignore[misc]
    evict = front.evict_to(0, "abcdefgh")
    front.done(await front.job())
    await evict
    sent = await front.job_on(1)
    assert len(sent.blocks) // BLOCK_DTYPE.itemsize == 4, "an eighth of an arena of 32 blocks is on its way to one volume"
    assert sorted(front.pins("abcdefgh")) == [1] * 4 + [2] * 4 and front.no_job_on(1)
    await front.stand_still(1)
    await settle()
    assert sorted(front.pins("abcdefgh")) == [0] * 4 + [1] * 4
    assert front.core.counters["spill_blocks_failed_volume_down"] == front.core.counters["spill_blocks_failed"] == 8
    front.done_on(1, sent, Reason.IO_ERROR)
    await front.core.idle()
    assert front.pins("abcdefgh") == [0] * 8


async def test_incident_3_the_arena_slots_of_a_late_prefetch_stay_reserved_until_its_read_is_over(front: TwoVolumes) -> None:
    await front.store_on(0, "ab")
    assert front.evictor._spiller.prefetch(front.rows("ab"), clock.monotonic_s() + 600) == (2, 0, 0)
    sent = await front.job_on(0)
    assert sent.operation == Operation.PREFETCH
    await front.stand_still(0)
    arena = front.core.catalog.arena
    assert arena is not None and arena.reserved_count == 2
    front.done_on(0, sent, Reason.IO_ERROR)
    await front.core.idle()
    assert arena.reserved_count == 0


async def test_a_mover_that_stands_still_as_a_whole_says_nothing_of_the_volume(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    restore = front.restore(8, "a", deadline_s=10_000)
    job = await front.job_on(0)
    fences: list[asyncio.Future[None]] = []

    def fence(move: int) -> "asyncio.Future[None]":
        fences.append(asyncio.get_running_loop().create_future())
        return fences[-1]

    front.mover.fence = fence  # type: ignore[method-assign]
    front.clock.ahead_s += OPTIONS.late_s + 1
    for _ in range(3):
        front.watch.look(front.volumes[0])  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
    assert len(fences) == 1, "a mover that does not answer is asked again and again"
    fences[0].set_result(None)
    await asyncio.sleep(0.05)
    assert front.volumes[0].health.reads.admits
    front.done_on(0, job)
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED]


async def test_jobs_that_wait_for_their_engine_are_not_late(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    restore = front.restore(8, "a", deadline_s=10_000)
    job = await front.job_on(0)
    front.ends[0].send(Parked(job=job.job))
    await settle()
    front.clock.ahead_s += 100
    assert front.lanes[0].stalled_ns(clock.monotonic_ns()) == 0
    front.ends[0].send(Unparked(job=job.job))
    await settle()
    front.clock.ahead_s += 100
    assert front.lanes[0].stalled_ns(clock.monotonic_ns()) >= 99e9
    front.done_on(0, job)
    await restore


def lose_the_mover(front: TwoVolumes, volume: int) -> Channel[Job]:
    """What is left of it waits in the kernel; its end of the lane."""
    ours, theirs = socket_pair()
    theirs.setblocking(False)
    old, front.ends[volume] = front.ends[volume], Channel(theirs, Job)
    front.lanes[volume].connect(ours)
    return old


async def test_requests_of_a_mover_that_is_lost_are_answered_and_its_volume_is_suspected(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    restore = front.restore(8, "a", deadline_s=10_000)
    await front.job_on(0)
    old = lose_the_mover(front, 0)
    answer = await restore
    assert (answer.status.tolist(), answer.reason.tolist()) == ([RestoreStatus.FAILED], [Reason.WORKER_LOST])
    assert front.volumes[0].health.suspected and front.pins("a") == [1]
    front.watch.look(front.volumes[0])  # type: ignore[arg-type]
    await settle()
    assert len(front.volumes[0].probes) == 1
    old.close()
    await front.core.idle()
    assert front.pins("a") == [0]


async def test_an_arena_slot_that_a_lost_mover_may_still_write_to_a_volume_stays_pinned_while_it_is_spilled_elsewhere(front: TwoVolumes) -> None:
    front.volumes[1].serving = False  # type: ignore[misc]
    evict = front.evict_to(0, "ab")
    front.done(await front.job())
    await evict
    await front.job_on(0)
    old = lose_the_mover(front, 0)
    front.volumes[1].serving = True  # type: ignore[misc]
    probing = front.volumes[0]
    probing.health.options = replace(OPTIONS, probe_wait_s=0.01)
    front.watch.look(probing)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await probing.turned.wait()
    front.done_on(1, await front.job_on(1))
    await settle()
    assert front.core.counters["spilled_blocks"] == 2 and front.pins("ab") == [1, 1]
    old.close()
    await front.core.idle()
    assert front.pins("ab") == [0, 0]
    probing.probes[0].set_result(None)


async def test_a_volume_with_too_much_in_quarantine_is_off_whatever_its_probes_say_until_that_is_over(front: TwoVolumes) -> None:
    await front.store_on(0, "abcd")
    volume = front.volumes[0]
    volume.health.options = replace(OPTIONS, quarantined_bytes_max=SLOT_BYTES)
    restores = [front.restore(8 + number, name, deadline_s=10_000) for number, name in enumerate("ab")]
    for _ in restores:
        await front.job_on(0)
    old = lose_the_mover(front, 0)
    await asyncio.gather(*restores)
    assert volume.health.reads.admits
    front.watch.look(volume)  # type: ignore[arg-type]
    assert not volume.health.reads.admits and not volume.health.writes.admits and "quarantined_bytes_max is 8192" in volume.health.reads.reason

    async def probe_well() -> None:
        front.clock.ahead_s += 10
        front.watch.look(volume)  # type: ignore[arg-type]
        await settle()
        volume.probes[-1].set_result(None)
        await settle()

    await probe_well()
    assert not volume.health.reads.admits
    old.close()
    await front.core.idle()
    await probe_well()
    assert volume.health.reads.admits


async def test_a_probe_that_is_not_answered_turns_the_volume_off_and_its_late_answer_turns_it_on(front: TwoVolumes) -> None:
    volume, health = front.volumes[0], front.volumes[0].health
    health.options = HealthOptions(probe_wait_s=0.01)
    front.watch.look(volume)  # type: ignore[arg-type]
    await settle()
    assert not volume.probes, "a volume that nobody suspects is not probed"
    health.suspect()
    front.watch.look(volume)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await volume.turned.wait()
    assert "was not answered" in health.reads.reason and front.core.unreadable == {0}
    front.clock.ahead_s += 10
    front.watch.look(volume)  # type: ignore[arg-type]
    await settle()
    assert len(volume.probes) == 1, "one probe at a time"
    volume.probes[0].set_result(None)
    await settle()
    assert (health.reads.state, health.writes.state) == (BreakerState.CLOSED, BreakerState.HALF_OPEN)
    assert front.core.unreadable == set() and front.admitted == [0]


async def test_a_probe_that_fails_turns_it_off_but_not_one_that_could_not_be_made(front: TwoVolumes) -> None:
    volume, health = front.volumes[0], front.volumes[0].health
    for error, admits in ((Unavailable("the keeper is being restarted"), True), (VolumeError("EIO"), False)):
        health.suspect()
        front.clock.ahead_s += 10
        front.watch.look(volume)  # type: ignore[arg-type]
        await settle()
        volume.probes[-1].set_exception(error)
        await settle()
        assert health.reads.admits is admits


async def test_reads_that_fail_are_told_and_have_the_volume_probed_whose_good_answer_leaves_it_on(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    volume = front.volumes[0]
    for _ in range(2 * OPTIONS.failures_max):
        restore = front.restore(8, "a")
        front.done_on(0, await front.job_on(0), Reason.IO_ERROR)
        assert (await restore).reason.tolist() == [Reason.IO_ERROR]
    front.watch.look(volume)  # type: ignore[arg-type]
    await settle()
    volume.probes[0].set_result(None)
    await settle()
    assert volume.health.reads.admits and volume.health.writes.admits and not volume.health.wants_probe


async def test_a_good_probe_does_not_bring_back_a_volume_whose_writes_still_hang(front: TwoVolumes) -> None:
    volume, health = front.volumes[0], front.volumes[0].health
    front.volumes[1].serving = False  # type: ignore[misc]
    evict = front.evict_to(0, "ab", ack=AckLevel.DURABLE)
    job = await front.job_on(0)
    await front.stand_still(0)
    assert (await evict).reason.tolist() == [Reason.VOLUME_DOWN] * 2

    async def probe() -> None:
        front.clock.ahead_s += 10
        front.watch.look(volume)  # type: ignore[arg-type]
        await settle()
        volume.probes[-1].set_result(None)
        await settle()

    for _ in range(3):
        await probe()
        assert not health.reads.admits and not health.writes.admits
    front.done_on(0, job, Reason.CANCELLED)
    await settle()
    await probe()
    assert health.reads.admits and health.writes.admits


async def test_writes_that_fail_one_after_the_other_turn_writes_off_and_reads_go_on(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    front.volumes[1].serving = False  # type: ignore[misc]
    for number in range(OPTIONS.failures_max):
        evict = front.evict_to(0, "bcdefghijk"[number], ack=AckLevel.DURABLE)
        front.done_on(0, await front.job_on(0), Reason.IO_ERROR)
        assert (await evict).reason.tolist() == [Reason.IO_ERROR]
    health = front.volumes[0].health
    assert health.reads.admits and not health.writes.admits
    restore = front.restore(8, "a")
    front.done_on(0, await front.job_on(0))
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED]
    front.clock.ahead_s += 10
    health.probed("")
    assert health.writes.state is BreakerState.HALF_OPEN
    evict = front.evict_to(0, "k", ack=AckLevel.DURABLE)
    front.done_on(0, await front.job_on(0))
    assert (await evict).status.tolist() == [EvictStatus.STORED] and health.writes.state is BreakerState.CLOSED


async def test_the_lane_of_a_gpu_that_stands_still_only_has_the_volume_probed(front: TwoVolumes) -> None:
    await front.store_on(0, "a")
    gpu = Device("cuda:0", front.mover, (Path.BOUNCE,))  # type: ignore[arg-type]
    front.core.devices["cuda:0"] = gpu
    lane = front.add_lane(gpu, front.volumes[0], Path.BOUNCE)
    front.lanes.append(lane)
    front.core.regions._by_number[1] = front.region = replace(front.region, device=gpu)
    restore = front.restore(8, "a", deadline_s=10_000)
    job = await front.job_on(2)
    front.clock.ahead_s += 100
    front.watch.look(front.volumes[0])  # type: ignore[arg-type]
    await settle()
    assert len(front.volumes[0].probes) == 1 and front.volumes[0].health.reads.admits
    front.done_on(2, job)
    await restore


async def test_an_evict_whose_first_lane_refuses_it_at_once_is_not_copied_before_the_second_has_copied(front: TwoVolumes) -> None:
    send = front.evictor._send

    def turned_between(*arguments: Any) -> Any:
        front.lanes[0].refuse(reads=True, writes=True)
        return send(*arguments)

    front.evictor._send = turned_between  # type: ignore[method-assign]
    front.device.arena_lane, arena = None, front.device.arena_lane
    evict = front.evict_to(0, "abcdefgh")
    job = await front.job_on(1)
    await settle()
    front.device.arena_lane = arena
    assert not evict.done(), "an evict was answered while its sources were still to be copied"
    front.done_on(1, job)
    assert sorted(set((await evict).status.tolist())) == [EvictStatus.STORED, EvictStatus.FAILED]
