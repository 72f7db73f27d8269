"""Which work of a lane tells how fast its way is: the order of beginnings, results and ends is the test's."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from offloadd import clock
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import Path, Tier, Way
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Job, Operation, SliceDone
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import Move
from offloadd.offload.traffic import STALLED_NS, Run, Traffic
from offloadd.scheduler.job_class import JobClass
from tests.offload.queues import queue_of

SLOT_BYTES = 8192


def run(device: str = "cuda:0", volume: int = 0, path: Path = Path.GDS, *, move: int = 1, operation: Operation = Operation.RESTORE, **values: object) -> Run:
    made = Run(device, volume, path, move, int(operation), durable=True, started_ns=1000)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def job(number: int = 1, operation: Operation = Operation.RESTORE) -> Job:
    return Job(job=number, move=1, operation=int(operation), slot_bytes=SLOT_BYTES, blocks=b"")


def done(io_bytes: int = SLOT_BYTES, *, queue_ns: int = 0, way: Way = Way.GDS_NVFS) -> SliceDone:
    return SliceDone(
        job=1, results=b"", queue_ns=queue_ns, copy_ns=0, checksum_ns=0, io_ns=0, payload_bytes=max(0, io_bytes - 4096), io_bytes=io_bytes, way=int(way)
    )


def worked(one: Run, *slices: SliceDone) -> Run:
    one.add(one.move, job(operation=Operation(one.operation)), len(slices), 2000)
    for piece in slices:
        one.slice(piece, 2000)
    return one


def test_a_run_alone_counts_from_its_first_start_to_its_last_result() -> None:
    over: list[Run] = []
    traffic = Traffic(over.append)
    one = run()
    traffic.begin(one)
    worked(one, done(queue_ns=400), done(queue_ns=300))
    assert not traffic.idle("cuda:0", 9, 2000) and not traffic.idle("cuda:9", 0, 2000) and traffic.idle("cuda:9", 9, 2000)
    traffic.end(one, 11_300)
    assert traffic.idle("cuda:0", 0, 2000)
    (run_over,) = over
    assert run_over.counts and run_over.seconds == 10_000 / 1e9 and run_over.payload_bytes == 2 * 4096


@pytest.mark.parametrize(("device", "volume"), [("cuda:0", 1), ("cuda:1", 0), ("host", 0), ("cuda:0", -1)])
@pytest.mark.parametrize("first", [True, False])
def test_two_that_share_a_gpu_or_a_volume_say_nothing(device: str, volume: int, first: bool) -> None:
    traffic = Traffic()
    pair = [run(), run(device, volume, move=2)]
    for one in pair if first else reversed(pair):
        traffic.begin(one)
    for one in pair:
        traffic.end(worked(one, done()), 9000)
        assert not one.counts


def test_two_that_share_nothing_both_count() -> None:
    traffic = Traffic()
    pair = [run(), run("cuda:1", 1, move=2)]
    for one in pair:
        traffic.begin(one)
    for one in pair:
        traffic.end(worked(one, done()), 9000)
        assert one.counts


def test_another_move_or_operation_on_the_lane_says_nothing() -> None:
    for move, operation in ((2, Operation.RESTORE), (1, Operation.EVICT)):
        one = worked(run(), done())
        one.add(move, job(2, operation), 0, 2000)
        assert not one.counts


@pytest.mark.parametrize("slices", [[done(0)], [done(), done(SLOT_BYTES, way=Way.CUFILE_POSIX)], [done(), done(4096)]])
def test_what_failed_fell_short_or_bounced_does_not_count(slices: list[SliceDone]) -> None:
    assert not worked(run(), *slices).counts


def test_only_evicts_that_are_durable_count_and_nothing_that_no_request_asked_for() -> None:
    assert worked(run(operation=Operation.EVICT), done()).counts
    assert not worked(run(operation=Operation.EVICT, durable=False), done()).counts
    for operation in (Operation.SPILL, Operation.PREFETCH, Operation.READ_ONLY, Operation.NULL):
        assert not worked(run(operation=operation), done()).counts


def test_work_on_a_volume_that_hangs_is_no_load_for_others() -> None:
    traffic = Traffic()
    hung = run()
    traffic.begin(hung)
    now_ns = hung.started_ns + STALLED_NS + 1
    assert not traffic.idle("cuda:0", 1, now_ns - 1) and traffic.idle("cuda:0", 1, now_ns)
    other = replace(run("cuda:0", 1, move=2), started_ns=now_ns)
    other.moved_ns = now_ns
    traffic.begin(other)
    traffic.end(worked(other, done()), now_ns + 9000)
    assert other.counts


def lane_of(traffic: Traffic) -> Lane:
    return Lane(
        number=1,
        name="volume",
        tier=Tier.VOLUME,
        path=Path.GDS,
        queue=queue_of(),
        device="cuda:0",
        volume=3,
        traffic=traffic,
    )


async def test_a_lane_tells_its_runs_from_idle_to_idle_before_their_moves_are_over() -> None:
    moves = {number: Move(number=number, count=1) for number in (1, 2, 3)}
    heard: list[tuple[Run, bool]] = []
    traffic = Traffic(lambda one: heard.append((one, moves[one.move].done)))
    lane = lane_of(traffic)
    ours, theirs = socket_pair()
    lane.connect(ours)
    results = np.zeros(1, dtype=RESULT_DTYPE).tobytes()

    def submit(number: int) -> None:
        lane.submit(moves[number], replace_number(job(), number), np.zeros(1, dtype=BLOCK_DTYPE), JobClass.INTERACTIVE)

    async def answer(number: int) -> None:
        Channel(theirs, Job).send(replace_job(done(), number, results))
        async with asyncio.timeout(30):
            await moves[number].finished.wait()

    submit(1)
    await answer(1)
    submit(2)
    submit(3)
    await answer(2)
    assert not traffic.idle("cuda:0", 3, clock.monotonic_ns())
    await answer(3)
    assert [(one.move, one.device, one.volume, one.path, one.counts, over) for one, over in heard] == [
        (1, "cuda:0", 3, Path.GDS, True, False),
        (2, "cuda:0", 3, Path.GDS, False, True),
    ]
    assert traffic.idle("cuda:0", 3, clock.monotonic_ns())
    lane.disconnect()
    theirs.close()


async def test_a_lane_whose_mover_died_is_idle_and_its_run_does_not_count() -> None:
    heard: list[Run] = []
    traffic = Traffic(heard.append)
    lane = lane_of(traffic)
    ours, theirs = socket_pair()
    lane.connect(ours)
    move = Move(number=1, count=1)
    lane.submit(move, job(), np.zeros(1, dtype=BLOCK_DTYPE), JobClass.INTERACTIVE)
    theirs.close()
    async with asyncio.timeout(30):
        await move.finished.wait()
    assert [one.counts for one in heard] == [False] and traffic.idle("cuda:0", 3, clock.monotonic_ns())


def replace_number(order: Job, number: int) -> Job:
    return msgspec.structs.replace(order, job=number, move=number)


def replace_job(slice_done: SliceDone, number: int, results: bytes) -> SliceDone:
    return msgspec.structs.replace(slice_done, job=number, results=results)
