"""A frame of `offloadd top`: its figures are the daemon's, and it fits."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from rich.cells import cell_len

from offloadd.cli.status import values_of
from offloadd.cli.top_frame import Interval, frame
from offloadd.units import GIB, MIB
from offloadd.v1 import admin_pb2 as pb

CLASSES = ("interactive", "prefetch", "preempt", "background", "spill")
VOLUME = "/var/lib/offloadd/nvme0n1-volume0"


def status(*, seconds: int = 100, sessions: int = 1, volumes: int = 1) -> pb.StatusResponse:
    return pb.StatusResponse(
        version="0.1.0",
        pid=4711,
        uptime=Duration(seconds=seconds),
        state="SERVING",
        sessions=[
            pb.SessionStatus(
                name=f"s-{number}", instance=f"vllm-{number}", tenant="uid:1000", pid=31337 + number, region_count=2, mapped_bytes=16 * GIB, request_count=3
            )
            for number in range(sessions)
        ],
        arena=pb.ArenaStatus(arena_bytes=GIB, used_bytes=512 * MIB, block_count=819, pages="2 MiB huge pages"),
        volumes=[
            pb.VolumeStatus(path=f"{VOLUME}{number or ''}", uuid="00", state="serving", volume_bytes=3_840 * GIB, used_bytes=1_200 * GIB, block_count=1_966_080)
            for number in range(volumes)
        ],
        workers=[pb.WorkerStatus(name="mover host", pid=4712, copies_by="C with AVX-512"), pb.WorkerStatus(name=f"keeper {VOLUME}", restart_count=2)],
        block_count=1_966_899,
        block_count_max=8_000_000,
        held_count=17,
        classes=[pb.ClassStatus(job_class=name) for name in CLASSES],
        queues=[pb.QueueStatus(volume=volume, job_class=name) for volume in ("", VOLUME) for name in CLASSES],
        hits=pb.HitStatus(),
    )


def shown(before: pb.StatusResponse | None, now: pb.StatusResponse, width: int = 80, height: int = 23, **options: Any) -> list[str]:
    interval = Interval.of(None if before is None else values_of(before), values_of(now))
    return [line.plain for line in frame(interval, width=width, height=height, **options)]


def row(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def words(lines: list[str], start: str) -> list[str]:
    return row(lines, start)[len(start) :].split()


def test_rates_are_what_lies_between_two_answers_by_the_daemons_clock() -> None:
    before, now = status(seconds=100), status(seconds=104)
    for answer, factor in ((before, 1), (now, 3)):
        one = answer.classes[0]
        one.done_count, one.payload_bytes = 100 * factor, 8_000_000_000 * factor
        answer.volumes[0].read_bytes, answer.volumes[0].written_bytes = 4_000_000 * factor, 6_000 * factor
        answer.arena.written_bytes = 200 * factor
        answer.sessions[0].evicted_bytes, answer.sessions[0].restored_bytes = 10**9 * factor, 5 * 10**9 * factor
        answer.hits.looked_up_count, answer.hits.held_count = 100 * factor, 60 * factor * factor // 3
        answer.hits.asked_count, answer.hits.restored_count = 50 * factor, 50 * factor
    one = now.classes[0]
    one.recent_count, one.p50.nanos, one.p99.nanos = 200, 2_100_000, 153_000_000
    lines = shown(before, now)
    assert words(lines, "interactive") == ["50.0", "4.0", "GB/s", "2.1", "ms", "153", "ms", "-", "-"]
    volume = next(line for line in lines if "volume0 " in line)
    assert volume.split()[-4:] == ["2.0", "MB/s", "3.0", "kB/s"]
    assert row(lines, "arena").split()[-3:] == ["-", "100", "B/s"]
    assert words(lines, "s-0")[-4:] == ["500", "MB/s", "2.5", "GB/s"]
    # 160 of 200 now, 180 of 300 since the start.
    assert "lookups 80 % (60 %), restores 100 % (100 %)" in lines[2]


def test_what_waits_and_what_is_in_flight_is_added_up_by_class_and_by_tier() -> None:
    now = status()
    arena, volume = now.queues[2], now.queues[7]
    assert arena.job_class == volume.job_class == "preempt"
    arena.ticket_count, arena.waiting_bytes, arena.job_count, arena.in_flight_bytes = 2, 3 * MIB, 1, MIB
    volume.ticket_count, volume.waiting_bytes, volume.job_count, volume.in_flight_bytes = 5, 61 * MIB, 3, 31 * MIB
    assert row(shown(None, now), "preempt").endswith("7 (64 MiB)      4 (32 MiB)")
    wide = shown(None, now, width=130)
    assert row(wide, "arena").endswith("2 (3 MiB)       1 (1 MiB)") and next(line for line in wide if "volume0 " in line).endswith("5 (61 MiB)      3 (31 MiB)")


def test_before_the_second_answer_no_rate_is_claimed() -> None:
    now = status()
    now.classes[0].done_count = 12
    lines = shown(None, now)
    assert words(lines, "interactive")[:2] == ["…", "…"] and "lookups … (-)" in lines[2]


@pytest.mark.parametrize("change", [{"pid": 4712}, {"uptime": Duration(seconds=99)}])
def test_another_daemons_counts_are_not_compared_with(change: dict[str, Any]) -> None:
    before, now = status(), status(seconds=200)
    before.classes[0].done_count = 1_000
    for name, value in change.items():
        if name == "pid":
            now.pid = value
        else:
            now.uptime.CopyFrom(value)
    assert words(shown(before, now), "interactive")[0] == "…"


def test_a_session_that_came_meanwhile_has_its_rate() -> None:
    before, now = status(seconds=100, sessions=1), status(seconds=102, sessions=2)
    now.sessions[1].restored_bytes = 4_000_000
    assert words(shown(before, now), "s-1")[-2:] == ["2.0", "MB/s"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 23), (120, 40), (132, 24), (60, 15), (40, 10), (20, 5), (80, 1)])
@pytest.mark.parametrize(("sessions", "volumes"), [(0, 0), (1, 1), (40, 1), (3, 12), (200, 64)])
def test_a_frame_fits_its_terminal(width: int, height: int, sessions: int, volumes: int) -> None:
    lines = shown(status(), status(seconds=101, sessions=sessions, volumes=volumes), width=width, height=height, notice="the daemon is back", right="q quits")
    assert len(lines) <= height and max(map(cell_len, lines)) <= width


def test_at_80_by_24_everything_of_a_small_daemon_is_there() -> None:
    lines = shown(status(), status(seconds=101, sessions=2), right="every 1 s, q quits")
    joined = "\n".join(lines)
    for fact in ("SERVING", "up 1 min 41 s", "pid 4711", "every 1 s, q quits", "1,966,899 of 8,000,000 blocks (25 %), 17 kept or leased; 2 sessions"):
        assert fact in joined
    for fact in ("arena", "512 MiB", "50 %", "volume0", "1.2 TiB", "31 %", "s-0", "s-1", "31338", "mover host", "C with AVX-512", "restarting", "spill"):
        assert fact in joined, fact


def test_what_has_no_room_is_counted_and_what_is_not_well_comes_first() -> None:
    now = status(volumes=12, sessions=30)
    now.volumes[9].state = "retrying: Input/output error; tried again in 0.3 s"
    now.volumes[10].reads_breaker = now.volumes[10].writes_breaker = "open: a probe was not answered in 2.0 s"
    now.volumes[11].reads_breaker, now.volumes[11].writes_breaker = "closed", "open: writes failed, one after the other"
    lines = shown(None, now)
    joined = "\n".join(lines)
    assert "retrying" in joined and " off " in joined
    tiers = [line for line in lines if "volume0" in line or line.startswith(("arena", "…/"))]
    assert "more tiers" in joined and "more sessions" in joined and tiers
    tall = shown(None, now, height=80)
    assert "writes off" in next(line for line in tall if "volume011" in line) and "more" not in "\n".join(tall)
    order = [line.split()[0] for line in tall if "volume0" in line and "TiB" in line]
    assert order == sorted(order, key=lambda name: int(name.rpartition("volume0")[2] or 0)), "with room for all they stand in their own order"


def test_where_not_all_sessions_have_room_those_that_move_most_come_first() -> None:
    before, now = status(seconds=100, sessions=30), status(seconds=101, sessions=30)
    now.sessions[27].restored_bytes = 10**9
    assert next(line for line in shown(before, now) if line.startswith("s-")).startswith("s-27")
    # Otherwise they stand still, however their rates change.
    assert next(line for line in shown(before, now, height=60) if line.startswith("s-")).startswith("s-0")


def test_a_small_terminal_has_no_empty_lines_and_no_titles_without_rows() -> None:
    lines = shown(status(), status(seconds=101, sessions=2, volumes=2), height=22)
    assert "" not in lines and "more" not in "\n".join(lines) and len(lines) == 19
    short = shown(None, status(), height=10)
    assert len(short) == 9 and not any(line.startswith("worker ") for line in short)
    assert "" in shown(None, status(), height=40)


def test_what_a_client_calls_itself_can_not_steer_the_terminal() -> None:
    now = status()
    now.sessions[0].instance = "\x1b[2J[bold]x\n"
    joined = "".join(shown(None, now, width=200))
    assert "\x1b" not in joined and "\n" not in joined and "�[2J[bold]x�" in joined


def test_a_tenant_stands_in_no_frame_of_80_columns() -> None:
    assert "uid:1000" not in "\n".join(shown(None, status()))


def test_a_gpu_that_can_not_be_used_is_told_beside_its_mover() -> None:
    now = status()
    now.workers.add(name="mover cuda:0", pid=4713, placement="node 0")
    now.gpus.add(device="cuda:0", note="CUDA_ERROR_OUT_OF_MEMORY")
    assert row(shown(None, now, width=120), "mover cuda:0").rstrip().endswith("GPU can't be used: CUDA_ERROR_OUT_OF_ME…")
    now.gpus[0].note = ""
    assert row(shown(None, now, width=120), "mover cuda:0").rstrip().endswith("node 0")


def test_an_answer_of_an_older_daemon_is_shown_as_far_as_it_goes() -> None:
    assert "SERVING" in shown(None, pb.StatusResponse(version="0.1.0", state="SERVING", uptime=Duration(seconds=1)))[0]
