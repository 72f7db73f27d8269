"""The order of a mover's answers is chosen by the test, which stands at the other end of the arena's lane."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from offloadd import clock
from offloadd.catalog.catalog import Catalog
from offloadd.catalog.index import keys_array
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import AckLevel, EvictStatus, Path, Reason, RestoreStatus, Tier
from offloadd.model.namespace import KeyMaker
from offloadd.model.region import Layout, Plane
from offloadd.model.requests import BlockBatch, EvictOptions, RestoreOptions
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Copied, Job, Operation, Parked, SliceDone, Unparked
from offloadd.offload.admission import Admission, AdmissionLimits
from offloadd.offload.core import Core
from offloadd.offload.devices import HOST, Device
from offloadd.offload.evict import Evictor
from offloadd.offload.lanes import Lane
from offloadd.offload.namespaces import Namespaces
from offloadd.offload.regions import Region, Regions
from offloadd.offload.restore import Restorer
from offloadd.offload.sessions import SessionTable
from offloadd.offload.spill import Spiller
from tests.offload.queues import queue_of

BLOCK_BYTES = 4096


class Quiet:
    """Hears what requests did, and does nothing."""

    def request_done(self, operation: str, answer: Any) -> None: ...

    def bytes_moved(self, operation: str, uses: Any) -> None: ...

    def blocks(self, operation: str, outcome: str, tier: Tier, count: int) -> None: ...

    def remote_blocks(self, operation: str, count: int) -> None: ...


class Mover:
    """Fences at once: nothing here copies."""

    #: It has said nothing of itself.
    hello = None

    def __init__(self) -> None:
        self.fenced: list[int] = []

    def fence(self, move: int) -> "asyncio.Future[None]":
        self.fenced.append(move)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def forget_move(self, move: int) -> None: ...


@dataclass
class Front:
    """A front with an arena and one region of 16 blocks; `lane` is the test's end of the arena's lane."""

    core: Core = field(init=False)
    mover: Mover = field(default_factory=Mover)

    def __post_init__(self) -> None:
        sessions = SessionTable(sessions_max=1, memories_per_session_max=1, on_end=lambda session: None)
        self.session = sessions.create(tenant="uid:1", instance="engine", uid=1, pid=1)
        self.device = Device(HOST, self.mover, (Path.HOST,))  # type: ignore[arg-type]
        regions = Regions(sessions, regions_per_session_max=1, planes_per_region_max=1, payload_bytes_max=1 << 20)
        namespaces = Namespaces()
        entry = namespaces.enter(b"n" * 32)
        self.region = Region(
            number=1,
            region_id=b"r" * 16,
            session=self.session,
            device=self.device,
            layout=Layout(16, (Plane(0, 0, BLOCK_BYTES, BLOCK_BYTES),)),
            memory_ids=(),
            cache_group=0,
            namespace=entry,
            keys=KeyMaker(entry.namespace_id, 0),
            payload_bytes=BLOCK_BYTES,
            slot_bytes=2 * BLOCK_BYTES,
            mapped_bytes=16 * BLOCK_BYTES,
            block_tokens=16,
        )
        regions._by_number[1] = self.region
        catalog = Catalog(capacity=64)
        catalog.add_arena(slab_count=2, slot_count_for=lambda slot_bytes: 16)
        self.core = Core(
            catalog=catalog,
            namespaces=namespaces,
            regions=regions,
            devices={HOST: self.device},
            observer=Quiet(),
            arena_slab_bytes=16 * BLOCK_BYTES,
            admission=Admission(AdmissionLimits(8, 8, 1 << 20, 1 << 20, 1 << 40, 1 << 40)),
            verify_target=0,
        )
        ours, theirs = socket_pair()
        lane = Lane(number=0, name="arena", tier=Tier.ARENA, path=Path.DDR, queue=queue_of())
        lane.connect(ours)
        self.device.arena_lane = lane
        self.lane: Channel[Job] = Channel(theirs, Job)
        theirs.setblocking(False)
        self.evictor = Evictor(self.core, Spiller(self.core))
        self.restorer = Restorer(self.core)

    def batch(self, first: int, names: str) -> BlockBatch:
        keys = keys_array(self.region.keys.keys([name.encode() for name in names]))
        return BlockBatch(1, np.arange(first, first + len(names), dtype=np.uint32), keys, np.arange(len(names), dtype=np.uint32))

    def evict(self, first: int, names: str, **options: Any) -> "asyncio.Task[Any]":
        work = self.evictor.evict(self.session, [self.batch(first, names)], EvictOptions(deadline_s=clock.monotonic_s() + 60, tier=Tier.ARENA, **options))
        return asyncio.create_task(work)

    def restore(self, first: int, names: str, deadline_s: float = 60.0, request_id: str = "") -> "asyncio.Task[Any]":
        async def work() -> Any:
            options = RestoreOptions(deadline_s=clock.monotonic_s() + deadline_s, request_id=request_id)
            async for _, _, answer in self.restorer.restore(self.session, [self.batch(first, names)], options):
                last = answer
            return last

        return asyncio.create_task(work())

    async def job(self) -> Job:
        """The next job that the front sends."""
        while True:
            try:
                received = self.lane.receive()
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            assert received is not None
            return received[0]

    def no_job(self) -> bool:
        try:
            self.lane.receive()
        except BlockingIOError:
            return True
        return False

    def copied(self, job: Job) -> None:
        self.lane.send(Copied(job=job.job, count=len(job.blocks) // BLOCK_DTYPE.itemsize))

    def done(self, job: Job, reasons: dict[int, Reason] | None = None) -> None:
        blocks = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)
        results = np.zeros(len(blocks), dtype=RESULT_DTYPE)
        results["position"] = blocks["position"]
        for position, reason in (reasons or {}).items():
            results["reason"][position] = reason
        size = BLOCK_BYTES * len(blocks)
        self.lane.send(SliceDone(job=job.job, results=results.tobytes(), queue_ns=1, copy_ns=1, checksum_ns=1, io_ns=0, payload_bytes=size, io_bytes=0))


async def settle() -> None:
    """Let the loop do all that it can do."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    made = Front()
    yield made
    made.core.catalog.check()
    made.device.arena_lane.disconnect()  # type: ignore[union-attr]
    made.lane.close()


async def test_incident_5_a_restore_waits_for_the_evict_of_its_block_that_was_answered_but_is_not_over(front: Front) -> None:
    evict = front.evict(0, "ab")
    job = await front.job()
    front.copied(job)
    answer = await evict
    assert answer.status.tolist() == [EvictStatus.STORED] * 2, "COPIED does not wait for the checksum"
    restore = front.restore(8, "ab")
    await settle()
    assert not restore.done() and front.no_job(), "the restore ran ahead of the write"
    front.done(job)
    read = await front.job()
    assert read.operation == Operation.ARENA_RESTORE
    front.done(read)
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED] * 2


class ScannedVolume:
    """A volume that was opened after a restart and is being scanned."""

    def __init__(self) -> None:
        self.scanning, self.serving, self.ordinal = True, False, 0
        self.scan_until_s = clock.monotonic_s() + 60
        self.slabs_changed = asyncio.Event()


@pytest.mark.parametrize("found", [True, False])
async def test_a_restore_right_after_a_restart_waits_for_the_scan_that_may_find_its_blocks(front: Front, found: bool) -> None:
    volume = ScannedVolume()
    front.core.volumes.append(volume)  # type: ignore[arg-type]
    restore = front.restore(8, "a")
    await settle()
    assert not restore.done() and front.no_job(), "a block that the scan has not come to was called missing"
    if found:
        # The scan finds it; here an evict stands for that.
        evict = front.evict(0, "a")
        front.done(await front.job())
        await evict
    else:
        volume.scanning = False
    volume.slabs_changed.set()
    if found:
        front.done(await front.job())
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED if found else RestoreStatus.NOT_FOUND]


async def test_incident_7_a_failed_evict_is_never_visible_and_leaves_no_slot(front: Front) -> None:
    evict = front.evict(0, "ab")
    job = await front.job()
    front.copied(job)
    await evict
    front.done(job, {1: Reason.IO_ERROR})
    await front.core.idle()
    assert front.core.catalog.arena is not None and front.core.catalog.arena.used_slots == 1
    restore = front.restore(8, "ab")
    front.done(await front.job())
    assert (await restore).status.tolist() == [RestoreStatus.RESTORED, RestoreStatus.NOT_FOUND]


async def test_incident_1_an_evict_is_not_answered_before_every_source_was_copied(front: Front) -> None:
    evict = front.evict(0, "abcd")
    job = await front.job()
    front.lane.send(Copied(job=job.job, count=3))
    await settle()
    assert not evict.done()
    front.lane.send(Copied(job=job.job, count=1))
    assert (await evict).status.tolist() == [EvictStatus.STORED] * 4
    front.done(job)
    await front.core.idle()


async def test_an_evict_that_waits_for_its_engine_holds_up_no_other(front: Front) -> None:
    assert front.device.arena_lane is not None
    queue = front.device.arena_lane._queue
    queue._windows = replace(queue._windows, evict_bytes_in_flight=1)  # one job at a time
    first, second, third = front.evict(0, "ab"), front.evict(2, "cd"), front.evict(4, "ef")
    slow = await front.job()
    await settle()
    assert front.no_job()
    front.lane.send(Parked(job=slow.job))
    async with asyncio.timeout(60):
        other = await front.job()
    front.lane.send(Unparked(job=slow.job))
    front.copied(other)
    front.done(other)
    assert (await second).status.tolist() == [EvictStatus.STORED] * 2
    await settle()
    assert front.no_job() and not first.done(), "what begins takes its room again"
    front.copied(slow)
    front.done(slow)
    front.done(await front.job())
    for evict in (first, third):
        assert (await evict).status.tolist() == [EvictStatus.STORED] * 2
    await front.core.idle()


async def test_incident_6_a_block_whose_checksum_is_wrong_is_dropped_and_told(front: Front) -> None:
    evict = front.evict(0, "abc")
    job = await front.job()
    front.done(job)
    await evict
    restore = front.restore(8, "abc")
    front.done(await front.job(), {1: Reason.CHECKSUM_MISMATCH})
    answer = await restore
    assert answer.status.tolist() == [RestoreStatus.RESTORED, RestoreStatus.DATA_LOSS, RestoreStatus.RESTORED]
    again = front.restore(8, "b")
    assert (await again).status.tolist() == [RestoreStatus.NOT_FOUND]


async def test_at_the_deadline_the_move_is_fenced_before_the_answer(front: Front) -> None:
    evict = front.evict(0, "a")
    front.done(await front.job())
    await evict
    restore = front.restore(8, "a", deadline_s=0.05)
    job = await front.job()
    answer = await restore
    assert (answer.status.tolist(), answer.reason.tolist()) == ([RestoreStatus.FAILED], [Reason.DEADLINE])
    assert front.mover.fenced == [job.move]
    # The pin is held until the mover says that it is over: the slot may still be read.
    assert front.core.catalog.arena is not None
    rows = front.core.catalog.lookup(front.batch(0, "a").keys)
    assert front.core.catalog._pins[rows[0]] == 1
    front.done(job, {0: Reason.CANCELLED})
    await front.core.idle()
    assert front.core.catalog._pins[rows[0]] == 0


async def test_two_evicts_of_one_block_at_once_store_it_once(front: Front) -> None:
    first, second = front.evict(0, "a"), front.evict(1, "a")
    jobs = [await front.job(), await front.job()]
    for job in jobs:
        front.done(job)
    assert (await first).status.tolist() == (await second).status.tolist() == [EvictStatus.STORED]
    await front.core.idle()
    assert front.core.catalog.arena is not None and front.core.catalog.arena.used_slots == 1


async def test_a_hung_up_caller_leaves_no_pin_and_no_waiting_job(front: Front) -> None:
    evict = front.evict(0, "a", ack=AckLevel.COPIED)
    front.done(await front.job())
    await evict
    restore = front.restore(8, "a")
    job = await front.job()
    restore.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restore
    assert front.mover.fenced == [job.move], "nobody fenced the copy"
    assert not front.core.active
    front.done(job, {0: Reason.CANCELLED})
    await front.core.idle()
    assert front.core.catalog._pins.sum() == 0


def test_messages_between_processes_round_trip() -> None:
    job = Job(job=1, move=2, operation=int(Operation.RESTORE), slot_bytes=8192, blocks=b"x" * 128)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job) == job


@pytest.mark.parametrize("told_first", [True, False])
async def test_a_job_that_is_over_without_having_told_of_its_copies_holds_no_answer_back(front: Front, told_first: bool) -> None:
    move = front.core.new_move(4)
    move.sent(1, 2)
    move.sent(2, 2)
    steps = [lambda: move.on_copied(2, 2), lambda: move.on_copied(1, 2)]
    for step in steps if told_first else reversed(steps):
        assert not move.copied
        step()
    assert move.copied and not move.done
