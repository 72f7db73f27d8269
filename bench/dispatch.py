"""How many bytes a second can the front plan, dispatch and answer when nothing moves, and does it still answer others meanwhile?

Eight null movers answer every slice at once, so what is left is the front: catalog, scheduler, packing, sockets, results, answers. First the use cases alone,
then the same over gRPC from client processes. Health checks run beside it from a process of their own. The null movers share this machine's cores with the
front; `a front CPU second` says what one core of front is worth where they do not.
"""

import cProfile
import os
import pstats
import tempfile
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec

from bench.support.client import ClientProcess
from bench.support.cpu import cpu_seconds
from bench.support.daemon import DaemonThread, make_config
from bench.support.null_front import Demand, Load, NullFront, null_front
from bench.support.report import Figure, Report, Target, benchmark
from bench.support.stats import Summary
from bench.support.workload import load_workload
from offloadd.offload.sessions import Session
from offloadd.units import KIB, format_bytes

BYTES_PER_S_MIN = 200e9
HEALTH_P99_S_MAX = 0.1
#: Sketch: one message received, decoded, entered and its waiter woken; one block planned, packed and told.
SLICE_S = 30e-6
BLOCK_S = 1e-6
STAGING_SLOT_BYTES = 8 << 20


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`request_bytes` a request, over `request_blocks_stored` blocks that are there; `seconds` a measurement."""

    name: str
    mover_count: int
    block_bytes: list[int]
    request_bytes: int
    request_blocks_stored: int
    requests_in_flight: int
    seconds: float
    client_count: int


def expected_bytes_per_s(block_bytes: int) -> float:
    """By the sketch."""
    per_slice = max(1, STAGING_SLOT_BYTES // (block_bytes + 4 * KIB))
    return block_bytes / (SLICE_S / per_slice + BLOCK_S)


def tell(report: Report, name: str, load: Load, block_bytes: int, *, target: bool) -> None:
    """Bytes worth a second, wall and by CPU of the front."""
    size = load.blocks * block_bytes
    detail = Summary.of(load.latencies).detail(1e3, "request_ms_") if load.latencies else {}
    report.add(
        Figure(
            f"{name}: planned and answered",
            size / load.seconds / 1e9,
            "GB/s",
            expected_bytes_per_s(block_bytes) / 1e9,
            "block / (30 µs a slice + 1 µs a block)",
            target=Target(BYTES_PER_S_MIN / 1e9) if target else None,
            detail={**detail, "requests": load.requests, "front_cpu_share": load.front_cpu_s / load.seconds},
        )
    )
    report.add(Figure(f"{name}: a front CPU second", size / load.front_cpu_s / 1e9, "GB", detail={"us_per_block": load.front_cpu_s / load.blocks * 1e6}))


def tell_health(report: Report, name: str, seconds: list[float]) -> None:
    """p99 of the health checks that ran meanwhile."""
    summary = Summary.of(seconds)
    limit = Target(HEALTH_P99_S_MAX * 1e3, at_least=False)
    report.add(Figure(f"{name}: health p99 meanwhile", summary.p99 * 1e3, "ms", target=limit, detail=summary.detail(1e3, "ms_")))


def one_size(report: Report, work: Work, block_bytes: int, *, profile: bool) -> None:
    """All loads with blocks of one size."""
    request_blocks = max(1, work.request_bytes // block_bytes)
    name = f"{format_bytes(block_bytes)} × {request_blocks}"
    stored = work.request_blocks_stored // request_blocks * request_blocks
    with tempfile.TemporaryDirectory(prefix="offloadd-bench-") as directory:
        config = make_config(Path(directory), index_bytes_max=256 << 20)
        with DaemonThread(config) as front, ClientProcess(Path(directory), "bench") as engine, ClientProcess(Path(directory), "health") as prober:
            engine.ask("register", block_bytes=block_bytes, block_count=stored, fill=False)
            with null_front(front, mover_count=work.mover_count, tenant=engine.tenant, block_bytes=block_bytes, block_count=stored) as null:
                session = front.daemon.offload.sessions.sessions[0]
                region = front.daemon.offload.core.regions.of_session(session)[0].number
                demand = Demand(work.seconds, request_blocks, work.requests_in_flight)
                null.restore_load(session, region, replace(demand, seconds=work.seconds / 4))
                loads = {"restore": null.restore_load, "durable evict": null.evict_load}
                for title, load_of in loads.items():
                    if title == "durable evict":
                        # Last, since it takes the place of the blocks that the others restore.
                        over_grpc(report, work, null, Path(directory), prober, name, request_blocks)
                    report.say(f"{name}: {title}")
                    prober.tell("health_for", seconds=work.seconds)
                    load = load_of(session, region, demand)
                    tell(report, f"{title} {name}", load, block_bytes, target=title == "restore")
                    tell_health(report, f"{title} {name}", prober.answer()["seconds"])
                    if profile:
                        report.notes[f"profile of {title} {name}, without gRPC"] = profiled(null, load_of, session, region, demand)


def over_grpc(report: Report, work: Work, null: NullFront, runtime_dir: Path, prober: ClientProcess, name: str, request_blocks: int) -> None:
    """The same restores from client processes."""
    report.say(f"{name}: over gRPC, {work.client_count} clients")
    clients = [ClientProcess(runtime_dir, f"engine-{number}") for number in range(work.client_count)]
    try:
        for client in clients:
            client.ask("register", block_bytes=null.block_bytes, block_count=null.block_count, fill=False)
        before = cpu_seconds([os.getpid()])
        prober.tell("health_for", seconds=work.seconds)
        for number, client in enumerate(clients):
            client.tell("restore_for", seconds=work.seconds, stored_count=null.block_count, count=request_blocks, offset=number)
        answers = [client.answer() for client in clients]
        load = Load(seconds=work.seconds, front_cpu_s=cpu_seconds([os.getpid()]) - before)
        load.blocks = sum(answer["restored_count"] for answer in answers)
        load.requests = sum(answer["requests"] for answer in answers)
        if load.blocks != load.requests * request_blocks:
            raise RuntimeError(f"{load.blocks} of {load.requests * request_blocks} blocks were restored")
        tell(report, f"restore {name} over gRPC, {work.client_count} clients", load, null.block_bytes, target=False)
        tell_health(report, f"restore {name} over gRPC", prober.answer()["seconds"])
    finally:
        for client in clients:
            client.__exit__()


def profiled(null: NullFront, load_of: Callable[[Session, int, Demand], Load], session: Session, region: int, demand: Demand) -> str:
    """The functions of the front that take the most time of their own."""
    profile = cProfile.Profile()
    null.front.call(profile.enable)
    load_of(session, region, demand)
    null.front.call(profile.disable)
    text = StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def main() -> None:
    """Run it."""
    with benchmark("dispatch", "How many bytes a second can the front plan, dispatch and answer when nothing moves?") as report:
        work = load_workload(Work, "dispatch_70b", tiny=report.tiny)
        for block_bytes in work.block_bytes:
            one_size(report, work, block_bytes, profile=not report.tiny and block_bytes == min(work.block_bytes))


if __name__ == "__main__":
    main()
