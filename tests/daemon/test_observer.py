"""What the use cases tell becomes series: the right ones, with the right values, and no more of them than can be said beforehand."""

import itertools

import numpy as np
import pytest
from prometheus_client import generate_latest

from offloadd.daemon.observer import MetricsObserver
from offloadd.metrics.registry import Metrics
from offloadd.model.enums import EvictStatus, Path, Reason, RestoreStatus, Tier, Way
from offloadd.model.slots import RESULT_DTYPE
from offloadd.mover.messages import SliceDone
from offloadd.offload.answers import Answer
from offloadd.offload.moves import Move, PathUse
from offloadd.scheduler.job_class import JobClass

#: Lines of a scrape that requests can make if everything happens that can: 160 request and 380 stage histograms of 22 lines each, and counters.
REQUEST_LINES_MAX = 12_100

DDR, HOST = (Tier.ARENA, Path.DDR, Way.PLAIN), (Tier.VOLUME, Path.HOST, Way.PLAIN)
WAYS = (DDR, HOST, (Tier.VOLUME, Path.BOUNCE, Way.PLAIN), (Tier.VOLUME, Path.GDS, Way.GDS_NVFS))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def observer(metrics: Metrics) -> MetricsObserver:
    return MetricsObserver(metrics)


def add_slice(move: Move, name: tuple[Tier, Path, Way], positions: list[int], reason: Reason = Reason.NONE, **times: int) -> None:
    results = np.zeros(len(positions), dtype=RESULT_DTYPE)
    results["position"], results["reason"] = positions, int(reason)
    nanoseconds = {"queue_ns": 0, "copy_ns": 0, "checksum_ns": 0, "io_ns": 0} | times
    payload_bytes = 0 if reason else 1000 * len(positions)
    move.on_slice(SliceDone(job=1, results=results.tobytes(), payload_bytes=payload_bytes, io_bytes=payload_bytes, **nanoseconds), name, len(positions))


def answer_of(statuses: list[tuple[int, Reason]], job_class: JobClass, uses: list[PathUse], seconds: float = 0.001) -> Answer:
    answer = Answer.of(len(statuses), job_class)
    answer.status[:] = [int(status) for status, _ in statuses]
    answer.reason[:] = [int(reason) for _, reason in statuses]
    answer.uses = uses
    answer.clock.total_ns = round(seconds * 1e9)
    return answer


def stage(metrics: Metrics, what: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"offloadd_stage_seconds_{what}", labels) or 0.0


def count(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"offloadd_{name}_total", labels) or 0.0


def test_a_move_is_observed_once_by_stage_and_way_however_many_slices_it_had(metrics: Metrics, observer: MetricsObserver) -> None:
    move = Move(number=1, count=6)
    for position in range(4):
        add_slice(move, HOST, [position], queue_ns=(position + 1) * 1_000_000, io_ns=2_000_000, copy_ns=500_000)
    add_slice(move, DDR, [4, 5], queue_ns=7_000_000, checksum_ns=3_000_000)
    observer.move_over("restore", JobClass.INTERACTIVE, move, 0.25)
    volume = {"operation": "restore", "class": "interactive", "tier": "volume", "path": "host", "outcome": "restored"}
    arena = volume | {"tier": "arena", "path": "ddr"}
    for name, seconds in (("queue", 0.004), ("io", 0.008), ("copy", 0.002), ("checksum", 0.0), ("total", 0.25)):
        assert stage(metrics, "count", stage=name, **volume) == 1
        assert stage(metrics, "sum", stage=name, **volume) == pytest.approx(seconds)
    assert stage(metrics, "sum", stage="queue", **arena) == pytest.approx(0.007)
    assert stage(metrics, "sum", stage="checksum", **arena) == pytest.approx(0.003)
    assert count(metrics, "bytes", operation="restore", tier="volume", path="host", way="plain") == 4000
    assert count(metrics, "bytes", operation="restore", tier="arena", path="ddr", way="plain") == 2000
    metrics.check_labels()


@pytest.mark.parametrize(
    ("operation", "reason", "quarantined", "outcome"),
    [
        ("evict", Reason.NONE, False, "stored"),
        ("evict", Reason.IO_ERROR, False, "failed"),
        ("evict", Reason.IO_ERROR, True, "quarantined"),
        ("restore", Reason.CHECKSUM_MISMATCH, False, "data_loss"),
        ("restore", Reason.DEADLINE, False, "failed"),
        ("prefetch", Reason.NONE, False, "stored"),
        ("spill", Reason.CHECKSUM_MISMATCH, False, "failed"),
    ],
)
def test_the_outcome_of_a_move_is_that_of_its_worst_block(
    metrics: Metrics, observer: MetricsObserver, operation: str, reason: Reason, quarantined: bool, outcome: str
) -> None:
    move = Move(number=1, count=2, quarantined=quarantined)
    add_slice(move, HOST, [0])
    add_slice(move, HOST, [1], reason)
    observer.move_over(operation, JobClass.SPILL, move, 0.5)
    labels = {"operation": operation, "class": "spill", "tier": "volume", "path": "host", "outcome": outcome, "stage": "total"}
    assert stage(metrics, "count", **labels) == 1


@pytest.mark.parametrize(
    ("uses", "tier", "path"),
    [
        ([], "none", "none"),
        ([PathUse(*HOST)], "volume", "host"),
        ([PathUse(*HOST), PathUse(*DDR)], "several", "several"),
        ([PathUse(*WAYS[2]), PathUse(*WAYS[3])], "volume", "several"),
        ([PathUse(Tier.VOLUME, Path.AUTO, Way.PLAIN)], "volume", "auto"),
    ],
)
def test_a_request_is_observed_by_class_way_and_worst_outcome(metrics: Metrics, observer: MetricsObserver, uses: list[PathUse], tier: str, path: str) -> None:
    statuses = [(RestoreStatus.RESTORED, Reason.NONE), (RestoreStatus.NOT_FOUND, Reason.NONE), (RestoreStatus.RESTORED, Reason.NONE)]
    observer.request_done("restore", answer_of(statuses, JobClass.PREFETCH, uses, 0.003))
    labels = {"operation": "restore", "class": "prefetch", "tier": tier, "path": path, "outcome": "not_found"}
    assert metrics.registry.get_sample_value("offloadd_request_seconds_sum", labels) == pytest.approx(0.003)
    assert metrics.registry.get_sample_value("offloadd_request_seconds_bucket", labels | {"le": "0.0025"}) == 0
    assert metrics.registry.get_sample_value("offloadd_request_seconds_bucket", labels | {"le": "0.005"}) == 1


def test_misses_and_refusals_are_counted_by_outcome_and_reason(metrics: Metrics, observer: MetricsObserver) -> None:
    restores = [
        (RestoreStatus.NOT_FOUND, Reason.NONE),
        (RestoreStatus.DATA_LOSS, Reason.CHECKSUM_MISMATCH),
        (RestoreStatus.DATA_LOSS, Reason.CHECKSUM_MISMATCH),
        (RestoreStatus.FAILED, Reason.VOLUME_DOWN),
        (RestoreStatus.QUARANTINED, Reason.DEADLINE),
        (RestoreStatus.RESTORED, Reason.NONE),
    ]
    observer.request_done("restore", answer_of(restores, JobClass.INTERACTIVE, []))
    evicts = [(EvictStatus.REJECTED, Reason.WRITE_BUDGET), (EvictStatus.DUPLICATE, Reason.NONE), (EvictStatus.STORED, Reason.NONE)]
    observer.request_done("evict", answer_of(evicts, JobClass.PREEMPT, []))
    misses = {("not_found", "none"): 1, ("data_loss", "checksum_mismatch"): 2, ("failed", "volume_down"): 1, ("quarantined", "deadline"): 1}
    for (outcome, reason), many in misses.items():
        assert count(metrics, "misses", outcome=outcome, reason=reason) == many
    shown = {name: value for name, value in metrics.counter_values() if "misses" in name or "not_stored" in name}
    assert sum(shown.values()) == 6 and shown['offloadd_not_stored_total{outcome="rejected",reason="write_budget"}'] == 1
    assert count(metrics, "blocks", operation="evict", outcome="duplicate", tier="any") == 1


def test_lookups_are_counted_by_what_was_held(metrics: Metrics, observer: MetricsObserver) -> None:
    observer.lookup_done(10, 7, 0.0001)
    assert (count(metrics, "lookup_blocks", outcome="held"), count(metrics, "lookup_blocks", outcome="missing")) == (7, 3)


def test_the_series_of_requests_are_bounded_whatever_happens(metrics: Metrics, observer: MetricsObserver) -> None:
    everything = [("restore", JobClass.INTERACTIVE), ("restore", JobClass.PREFETCH), ("prefetch", JobClass.PREFETCH)]
    everything += [("evict", JobClass.PREEMPT), ("evict", JobClass.BACKGROUND), ("spill", JobClass.SPILL)]
    for (operation, job_class), way, reason, quarantined in itertools.product(everything, WAYS, Reason, (False, True)):
        if quarantined and operation in ("spill", "prefetch"):
            # Nobody is answered for these.
            continue
        move = Move(number=1, count=2, quarantined=quarantined)
        add_slice(move, way, [0, 1], reason)
        observer.move_over(operation, job_class, move, 1.0)
    uses = [[PathUse(*way)] for way in WAYS]
    uses += [[], [PathUse(*HOST), PathUse(*DDR)], [PathUse(*WAYS[2]), PathUse(*WAYS[3])], [PathUse(Tier.VOLUME, Path.AUTO, Way.PLAIN)]]
    for (operation, job_class), used, reason in itertools.product(everything, uses, Reason):
        if operation in ("evict", "restore"):
            for status in list(EvictStatus if operation == "evict" else RestoreStatus)[1:]:
                observer.request_done(operation, answer_of([(status, reason)], job_class, used))
    metrics.check_labels()
    lines = [line for line in generate_latest(metrics.registry).decode().splitlines() if not line.startswith("#")]
    assert len(lines) <= REQUEST_LINES_MAX, f"{len(lines)} lines"
    # Again, and in any number: nothing is new.
    observer.request_done("evict", answer_of([(EvictStatus.STORED, Reason.NONE)] * 100, JobClass.PREEMPT, [PathUse(*DDR)]))
    assert len([line for line in generate_latest(metrics.registry).decode().splitlines() if not line.startswith("#")]) == len(lines)
