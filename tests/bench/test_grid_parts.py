"""Parts of the grid by themselves: content that tells blocks apart, ceilings that do what the daemon does, counters, and what is told of the rows."""

import argparse
import json
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.grid import counters
from bench.grid.ceilings import Memcpy, NoCeiling, RawIo, requests_of
from bench.grid.counters import Uncounted, controller_events, find_counter, perf_bytes
from bench.grid.kv_memory import HostKv, Pattern, Span
from bench.grid.measure import Measurement, requests_per_round
from bench.grid.node import Skip, accepted
from bench.grid.volumes import GridVolume, opened
from bench.support.ios import Io, over_threads, slices_of
from bench.support.report import Report, benchmark
from bench.support.row_table import row_tables
from bench.support.rows import Case, Operation, Row
from offloadd.errors import InvalidRequest
from offloadd.model.slots import BLOCK_DTYPE
from offloadd.mover.messages import Job
from offloadd.mover.messages import Operation as MoverOperation
from offloadd.mover.slices import cut
from offloadd.tiers.format import Geometry, slot_bytes_for
from offloadd.units import KIB, MIB

ROOT = Path(__file__).resolve().parents[2]


def case_of(**changes: object) -> Case:
    values: dict[str, object] = {
        "model": "llama-3-70b",
        "tensor_parallel": 8,
        "kv_dtype": "bf16",
        "block_tokens": 16,
        "block_bytes": 640 * KIB,
        "tokens": 512,
        "block_count": 32,
        "operation": Operation.RESTORE,
        "path": "host",
    }
    return Case(**(values | changes))  # type: ignore[arg-type]


# -- content -------------------------------------------------------------------------------------------------------------------------


def filled() -> tuple[HostKv, Pattern, Span]:
    span = Span(plane_count=3, block_count=10, piece_bytes=512)
    memory, pattern = HostKv(span), Pattern(span)
    pattern.fill(memory)
    return memory, pattern, span


def test_a_wiped_block_is_wrong_in_every_byte_until_it_is_back() -> None:
    memory, pattern, span = filled()
    chosen = np.array([7, 2, 5])
    assert pattern.wrong(memory, np.arange(10)) == 0
    before = [memory.read(plane).copy() for plane in range(span.plane_count)]
    pattern.wipe(memory, chosen)
    assert pattern.wrong(memory, chosen) == 3 and pattern.wrong(memory, np.arange(10)) == 3
    assert all((memory.read(plane)[chosen] != before[plane][chosen]).all() for plane in range(span.plane_count))


@pytest.mark.parametrize("plane", [0, 2])
def test_one_wrong_bit_and_swapped_blocks_are_seen(plane: int) -> None:
    memory, pattern, span = filled()
    memory.read(plane)[4, span.piece_bytes - 1] ^= 1
    assert pattern.wrong(memory, np.array([3, 4, 5])) == 1
    memory, pattern, _ = filled()
    content = memory.read(plane)
    content[[3, 4]] = content[[4, 3]]
    assert pattern.wrong(memory, np.array([3, 4, 5])) == 2


def test_bytes_of_another_engine_are_wrong() -> None:
    memory, _, span = filled()
    assert Pattern(span).wrong(memory, np.arange(10)) == 10


# -- ceilings ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "slot_bytes"),
    [
        (range(1), 644 * KIB),
        (range(7), 644 * KIB),
        (range(512), 644 * KIB),
        ([*range(40), *range(100, 140)], 644 * KIB),
        ([5, 3, 1], 644 * KIB),
        (range(64), 68 * KIB),
    ],
)
def test_the_ceiling_reads_in_the_pieces_that_a_lane_reads_in(slots: list[int], slot_bytes: int) -> None:
    records = np.zeros(len(slots), dtype=BLOCK_DTYPE)
    records["slot"] = list(slots)
    expected = []
    # The front sends jobs of at most 32 MiB, of equal length, each of which the lane cuts by itself.
    job_count = -(-len(slots) // (32 * MIB // slot_bytes))
    per_job = -(-len(slots) // job_count)
    for begin in range(0, len(slots), per_job):
        blocks = records[begin : begin + per_job].tobytes()
        job = Job(job=1, move=1, operation=MoverOperation.RESTORE, slot_bytes=slot_bytes, blocks=blocks, submitted_ns=0)
        lane = cut(job, thread_count=8, staging_slot_bytes=8 * MIB)
        expected += [(int(one.records["slot"][0]) * slot_bytes, len(one.records) * slot_bytes) for one in lane]
    assert list(slices_of([slot * slot_bytes for slot in slots], slot_bytes)) == expected


def test_slots_of_two_slabs_are_read_apart_though_they_follow_one_another() -> None:
    first = [number * 1000 for number in range(20)]

    def crossing(begin: int) -> bool:
        second = [begin + number * 1000 for number in range(44)]
        return any(offset < 20_000 < offset + size_bytes for offset, size_bytes in slices_of([*first, *second], 1000))

    assert crossing(20_000) and not crossing(20_004)


def test_slots_longer_than_a_staging_slot_are_read_in_several_ios() -> None:
    assert list(slices_of([0], 20 * MIB)) == [(0, 8 * MIB), (8 * MIB, 8 * MIB), (16 * MIB, 4 * MIB)]


def test_every_byte_of_every_request_is_in_the_ceiling() -> None:
    case = case_of(block_count=100, queue_depth=3, volume_count=2, gpu_count=2)
    slot_bytes = slot_bytes_for(case.block_bytes)
    slots = [list(range(0, 400 * slot_bytes, slot_bytes))] * 2
    requests = requests_of(case, slots)
    assert len(requests) == 6
    assert {sum(io.size_bytes for io in request) for request in requests} == {100 * slot_bytes}
    assert {io.volume for request in requests for io in request} == {0, 1}
    ranges = sorted((io.volume, io.offset, io.size_bytes) for request in requests for io in request)
    assert all(volume != other or offset + size <= following for (volume, offset, size), (other, following, _) in pairwise(ranges))


def test_an_error_of_one_thread_is_told_and_the_others_stop() -> None:
    def fail(_thread: int, io: Io) -> None:
        if io.offset == 3:
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        over_threads(4, [Io(0, number, 1) for number in range(100)], fail)


def test_the_start_of_threads_is_no_part_of_a_ceilings_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    clock = iter([10.0, 13.0])

    def read_clock() -> float:
        begun.append(len(started))
        return next(clock)

    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    monkeypatch.setattr("bench.support.ios.time.perf_counter", read_clock)
    done: list[int] = []
    assert over_threads(4, [Io(0, number, 1) for number in range(10)], lambda _, io: done.append(io.offset)) == 3.0
    assert begun[0] == 3 and sorted(done) == list(range(10))


def volume_of(path: Path, geometry: Geometry) -> GridVolume:
    return GridVolume(path, geometry, path.with_name(f"{path.name}.ceiling"))


def test_raw_writes_touch_no_byte_of_a_volume_and_leave_nothing_behind(tmp_path: Path) -> None:
    with opened([], tmp_path, count=2, volume_bytes=64 * MIB, slab_bytes=16 * MIB) as volumes:
        before = [volume.path.read_bytes() for volume in volumes]
        with RawIo(case_of(operation=Operation.EVICT, block_count=4, volume_count=2), volumes) as raw:
            assert raw.run(3) > 0 and all(Path(path).exists() for path in raw.paths)
        assert [volume.path.read_bytes() for volume in volumes] == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["grid-0.volume", "grid-1.volume"]
    assert list(tmp_path.iterdir()) == []


def test_reads_of_a_volume_without_such_slots_and_writes_to_a_device_are_no_ceiling(tmp_path: Path) -> None:
    with opened([], tmp_path, count=1, volume_bytes=64 * MIB, slab_bytes=16 * MIB) as (volume,):
        with pytest.raises(NoCeiling, match="no slab with such slots"):
            RawIo(case_of(), [volume])
        with pytest.raises(NoCeiling, match="would overwrite"):
            RawIo(case_of(operation=Operation.EVICT), [GridVolume(volume.path, volume.geometry, None)])


def test_a_file_that_stands_where_writes_would_go_is_left_alone(tmp_path: Path) -> None:
    with opened([], tmp_path, count=1, volume_bytes=64 * MIB, slab_bytes=16 * MIB) as (volume,):
        assert volume.scratch is not None
        volume.scratch.write_bytes(b"somebody's")
        with pytest.raises(FileExistsError):
            RawIo(case_of(operation=Operation.EVICT), [volume])
        assert volume.scratch.read_bytes() == b"somebody's"


def test_a_given_volume_stays_and_keeps_its_name_when_the_run_fails(tmp_path: Path) -> None:
    with opened([], tmp_path, count=1, volume_bytes=64 * MIB, slab_bytes=16 * MIB) as (volume,):
        given, new = tmp_path / "given", tmp_path / "new"
        given.write_bytes(volume.path.read_bytes())
        before = given.read_bytes()
        with pytest.raises(RuntimeError), opened([given, new], tmp_path, count=2, volume_bytes=64 * MIB, slab_bytes=16 * MIB) as both:
            assert [one.path for one in both] == [given, new] and new.exists()
            raise RuntimeError
        assert given.read_bytes() == before and not new.exists()


def test_a_file_system_without_room_for_a_slab_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="one slab"), opened([], tmp_path, count=1, volume_bytes=16 * MIB, slab_bytes=16 * MIB):
        pass
    assert list(tmp_path.iterdir()) == []


def test_copies_of_more_than_the_buffers_hold_are_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.grid.ceilings.COPY_BYTES_MAX", 3 * MIB)
    with Memcpy(case_of(block_count=16)) as memcpy:
        copied: list[int] = []
        monkeypatch.setattr(memcpy, "_copy", lambda size: copied.append(size) or 0.001)
        memcpy.run(2)
        assert sum(copied) == 2 * 10 * MIB and max(copied) == 3 * MIB
    with Memcpy(case_of(block_count=16)) as memcpy:
        assert memcpy.run(1) > 0


# -- rounds and refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_count", "depth", "count"), [(1, 1, 16), (1, 16, 96), (32, 1, 3), (2048, 1, 1), (2048, 16, 16)])
def test_a_round_has_as_many_requests_at_each_place(block_count: int, depth: int, count: int) -> None:
    assert requests_per_round(case_of(block_count=block_count, queue_depth=depth)) == count


def test_what_the_daemon_refused_is_the_reason_of_a_row() -> None:
    assert accepted({"seconds": [1.0]}) == {"seconds": [1.0]}
    with pytest.raises(Skip, match="path gds is not available"):
        accepted({"refused": "path gds is not available"})


class WrongBytes:
    """Engines whose restores bring wrong bytes back."""

    def all(self, command: str, **_arguments: object) -> list[dict[str, object]]:
        return [{"wrong": 1, "blocks": 32} if command == "verify" else {"seconds": [0.1], "begin": 0.0, "end": 0.1, "stages": {}, "ways": {"host": 1}}]


class NoNode:
    volumes = ()

    def cpu_s(self) -> float:
        return 0.0


@pytest.mark.parametrize("operation", list(Operation))
def test_a_wrong_byte_ends_the_run(operation: Operation) -> None:
    measurement = Measurement(NoNode(), WrongBytes(), rounds=1, counter=None, counter_note="")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="1 of 32 blocks came back with wrong bytes"):
        measurement.row(case_of(operation=operation, path="ddr"))


# -- counters ------------------------------------------------------------------------------------------------------------------------


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_counters_of_memory_controllers_are_found(tmp_path: Path) -> None:
    devices = tmp_path / "bus/event_source/devices"
    put(devices / "uncore_imc_0/events/cas_count_read")
    put(devices / "uncore_imc_0/events/cas_count_write")
    put(devices / "uncore_imc_free_running/events/data_read")
    put(devices / "amd_umc_3/format/rdwrmask")
    put(devices / "cpu/events/cycles")
    assert controller_events(tmp_path) == [
        "uncore_imc_0/cas_count_read/",
        "uncore_imc_0/cas_count_write/",
        "uncore_imc_free_running/data_read/",
        "amd_umc_3/event=0x0a,rdwrmask=0x1/",
        "amd_umc_3/event=0x0a,rdwrmask=0x2/",
    ]


def test_what_perf_says_is_added_up_in_bytes() -> None:
    text = "# started on Mon\n\n1.50,MiB,uncore_imc_0/cas_count_read/,1000,100.00,,\n0.50,MiB,uncore_imc_0/cas_count_write/,1000,100.00,,\n"
    assert perf_bytes(text) == 2 * MIB
    assert perf_bytes("10,,amd_umc_0/event=0x0a,rdwrmask=0x1/,5,100.00,,\n") == 640
    for text, said in (
        ("<not supported>,,uncore_imc_0/cas_count_read/,0,100.00,,\n", "not supported"),
        ("10.14,msec,task-clock,1,100.00,,\n", "no unit of bytes"),
        ("", "counted nothing"),
    ):
        with pytest.raises(Uncounted, match=said):
            perf_bytes(text)


def test_without_perfs_counters_those_of_resctrl_are_taken(tmp_path: Path) -> None:
    files = [put(tmp_path / f"fs/resctrl/mon_data/mon_L3_{number:02}/mbm_total_bytes", "1000\n") for number in range(2)]
    counter = find_counter(tmp_path)
    with counter.counting() as traffic:
        files[1].write_text("4500\n")
    assert traffic.size_bytes == 3500 and "without DMA" in counter.note
    with counter.counting() as traffic:
        files[0].write_text("Unavailable\n")
    assert traffic.size_bytes is None and "Unavailable" in traffic.fault


def test_without_any_counter_the_reason_names_both(tmp_path: Path) -> None:
    with pytest.raises(Uncounted, match=r"no counters of memory controllers.*resctrl is not mounted"):
        find_counter(tmp_path)
    put(tmp_path / "bus/event_source/devices/uncore_imc_0/events/cas_count_read")
    with pytest.raises(Uncounted, match=r"counted nothing.*resctrl is not mounted"):
        find_counter(tmp_path, perf="/bin/false")


def test_a_real_perf_is_started_and_ended(tmp_path: Path) -> None:
    program = counters.shutil.which("perf")
    if program is None:
        pytest.skip("perf is not installed")
    with counters.PerfCounter(program, ["task-clock"]).counting() as traffic:
        pass
    # Either it counts, in milliseconds, or this user may not count the whole machine.
    assert traffic.size_bytes is None and traffic.fault


# -- rows ----------------------------------------------------------------------------------------------------------------------------


def test_names_differ_where_only_the_device_does() -> None:
    assert case_of(path="ddr").name != case_of(path="ddr", gpu_count=1).name != case_of(path="ddr", gpu_count=2).name


def rows() -> list[Row]:
    common = {"seconds": [0.010, 0.020, 0.040], "gb_per_s": 1.5, "request_count": 3, "ceiling": "raw O_DIRECT reads", "ceiling_gb_per_s": 3.0, "ratio": 0.5}
    return [
        Row(case_of(), proven={"host": 1.0}, **common),  # type: ignore[arg-type]
        Row(case_of(operation=Operation.EVICT, ack="durable"), proven={"host": 0.75, "ddr": 0.25}, **common),  # type: ignore[arg-type]
        Row(case_of(path="recompute", volume_count=0), seconds=[0.2], gb_per_s=0.1, estimated=True),
        *(Row(case_of(path=path, gpu_count=1), skipped="no CUDA [driver]") for path in ("gds", "bounce")),
    ]


def test_the_tables_have_ways_ratios_and_the_reasons_of_rows_that_did_not_run() -> None:
    console = Console(width=140, record=True)
    for table in row_tables(rows()):
        console.print(table)
    text = " ".join(console.export_text().split())
    assert "llama-3-70b TP8 bf16, 640 KiB blocks" in text
    for words in ("restore host host 512 1 20 40 40* 1.5 3 0.50 0 10 ×", "evict durable host ddr 25% + host 75% 512", "recompute estimated 512 1 200 0.1"):
        assert words in text
    assert "2 gds, bounce no CUDA [driver]" in text
    assert "of fewer than 100 requests the p99 is the slowest" in text and "all 8 ranks; the restore is of fewer ranks' blocks" in text


def test_the_record_has_the_rows_and_refuses_a_case_twice(tmp_path: Path) -> None:
    report = Report("sample", "Is it so?", argparse.Namespace(dir=tmp_path, tiny=True, results=tmp_path / "results"))
    for row in rows():
        report.add_row(row)
    with pytest.raises(ValueError, match="reported already"):
        report.add_row(rows()[0])
    report.finish()
    record = json.loads((tmp_path / "results" / "sample.json").read_text())
    assert [row["skipped"] for row in record["rows"]] == ["", "", "", "no CUDA [driver]", "no CUDA [driver]"]
    assert record["rows"][0]["case"]["operation"] == "restore" and record["rows"][1]["proven"] == {"host": 0.75, "ddr": 0.25}
    assert record["rows"][0]["memory_bytes_per_byte"] is None


def test_a_run_that_ends_early_leaves_what_it_has_and_no_result(tmp_path: Path) -> None:
    command = ["--dir", str(tmp_path / "volumes"), "--results", str(tmp_path / "results")]
    with pytest.raises(RuntimeError, match="wrong bytes"), benchmark("sample", "Is it so?", arguments=command) as report:
        report.add_row(rows()[0])
        raise RuntimeError("wrong bytes")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["sample.partial.json"]
    record = json.loads((tmp_path / "results" / "sample.partial.json").read_text())
    assert record["facts"]["ended_by"] == "RuntimeError: wrong bytes" and len(record["rows"]) == 1


def test_bad_values_end_the_command_before_anything_is_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.restore_latency", "--depths", "0", "--dir", str(tmp_path / "made")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "depth is '0'; a whole number from 1 to 64 is needed" in " ".join(done.stderr.split())
    assert not (tmp_path / "made").exists()
