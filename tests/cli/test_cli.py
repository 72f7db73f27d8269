"""The command line: exit status, messages, and what `status` shows."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from rich.console import Console

from offloadd import __version__
from offloadd.cli.status import render, values_of
from offloadd.cli.tables import format_duration, plain
from offloadd.config import load_config
from offloadd.config.needs import memory_needs
from offloadd.model.runtime import ADMIN_SOCKET
from offloadd.units import GIB, MIB, format_bytes
from offloadd.v1 import admin_pb2, admin_pb2_grpc, offload_pb2


def offloadd(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command: Sequence[str] = [sys.executable, "-m", "offloadd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "80", **environment})


def busy_status() -> admin_pb2.StatusResponse:
    return admin_pb2.StatusResponse(
        version="0.1.0",
        pid=4711,
        uptime=Duration(seconds=11_520, nanos=500_000_000),
        state="SERVING",
        sessions=[
            admin_pb2.SessionStatus(
                name="s-8f3a21c0", instance="vllm-7b-replica-0", tenant="uid-1000", pid=31337, region_count=2, mapped_bytes=16 * GIB, request_count=3
            )
        ],
        arena=admin_pb2.ArenaStatus(arena_bytes=GIB, used_bytes=512 * MIB, block_count=819, pages="2 MiB huge pages"),
        volumes=[
            admin_pb2.VolumeStatus(
                path="/var/lib/offloadd/nvme0n1-volume0",
                uuid="00" * 16,
                state="serving",
                volume_bytes=3_840 * GIB,
                used_bytes=1_200 * GIB,
                block_count=1_966_080,
                slab_count=3_839,
                cut_count=1_201,
                open_count=8,
                file_system="xfs",
                direct_io="yes",
                scan_header_bytes=4096,
                recovery=Duration(nanos=250_000_000),
            ),
            admin_pb2.VolumeStatus(path="/dev/nvme1n1", state="failed: Input/output error", volume_bytes=GIB),
        ],
        workers=[admin_pb2.WorkerStatus(name="mover host", pid=4712), admin_pb2.WorkerStatus(name="keeper /dev/nvme1n1", restart_count=2)],
        gpus=[
            admin_pb2.GpuStatus(
                device="cuda:0",
                uuid="GPU-7374616e-6469-6e2d-6770-750000000000",
                name="NVIDIA H200",
                pci_bus_id="0000:10:00.0",
                compute_mode="EXCLUSIVE_PROCESS",
                uses_mps=True,
                context_bytes=527 * MIB,
            ),
            admin_pb2.GpuStatus(device="GPU-0123abcd-0000-0000-0000-00000000beef", note="open device 'GPU-0123abcd': CUDA_ERROR_OUT_OF_MEMORY"),
        ],
        block_count=1_966_899,
        block_count_max=8_000_000,
        held_count=17,
        load=admin_pb2.LoadStatus(
            request_count=3,
            request_count_max=512,
            block_count=8192,
            block_count_max=262_144,
            bytes_in_flight=40 * GIB,
            bytes_in_flight_max=128 * GIB,
            session_count=1,
            session_count_max=1024,
            refused_count=12,
        ),
        paths=[
            offload_pb2.PathCapability(
                tier=offload_pb2.TIER_ARENA, path=offload_pb2.PATH_DDR, device="host", available=True, restore_bytes_per_s=9_100_000_000, evict_bytes_per_s=0
            ),
            offload_pb2.PathCapability(
                tier=offload_pb2.TIER_VOLUME,
                path=offload_pb2.PATH_GDS,
                device="cuda:0",
                note="no CUDA device on this machine",
                volumes=[offload_pb2.VolumeRates(volume="/dev/nvme0n1", restore_bytes_per_s=6_200_000_000, restore_auto=True, note="no scratch area")],
            ),
        ],
        counters=[
            admin_pb2.Counter(name='offloadd_blocks_total{operation="evict",outcome="stored",tier="arena"}', value=123_456),
            admin_pb2.Counter(name='offloadd_bytes_total{operation="evict",tier="arena",path="ddr",way="plain"}', value=3 * GIB),
        ],
    )


def shown(status: admin_pb2.StatusResponse, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), color_system=None)  # noqa: SIM115, PTH123
    render(values_of(status), console)
    return console.export_text()


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def Status(self, request: admin_pb2.StatusRequest, context: grpc.ServicerContext) -> admin_pb2.StatusResponse:
        return busy_status()


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Iterator[Path]:
    server = grpc.server(ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)  # type: ignore[no-untyped-call]
    assert server.add_insecure_port(f"unix:{tmp_path / ADMIN_SOCKET}")
    server.start()
    yield tmp_path
    server.stop(0).wait()


def test_the_version_is_the_packages() -> None:
    done = offloadd("--version")
    assert (done.returncode, done.stdout) == (0, f"offloadd {__version__}\n")


def test_a_wrong_usage_exits_2() -> None:
    assert offloadd("volume", "format").returncode == 2
    assert offloadd("volume", "format", "/nonexistent/volume", "--size", "3 GB").returncode == 2
    assert offloadd("nonsense").returncode == 2


def test_an_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[limits]\nsessions_max = 0\n")
    for arguments in (("config", "check", bad), ("serve", "--config", bad)):
        done = offloadd(*arguments)
        assert done.returncode == 1
        assert done.stderr == f"offloadd: {bad}: limits.sessions_max is 0; at least 1 is needed\n"
    done = offloadd("volume", "show", tmp_path / "none")
    assert (done.returncode, done.stderr) == (1, f"offloadd: {tmp_path / 'none'}: No such file or directory\n")
    (tmp_path / "text").write_text("not a volume\n" * 1000)
    done = offloadd("volume", "show", tmp_path / "text")
    assert done.returncode == 1
    assert done.stderr.startswith("offloadd: ")
    assert done.stderr.count("\n") == 1


def test_a_right_configuration_is_told(tmp_path: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text("[arena]\narena_bytes = '128 MiB'\n[[volume]]\npath = '/a'\n")
    done = offloadd("config", "check", good)
    first, memory, *parts = done.stdout.splitlines()
    assert (done.returncode, first) == (0, f"{good} is right: an arena of 128 MiB, 1 volume")
    needs = memory_needs(load_config(good))
    assert memory == f"memory: {format_bytes(sum(need.bytes for need in needs))} at most"
    assert [part.split("  ")[-1] for part in parts] == [need.what for need in needs]
    assert parts[0].split() == ["128", "MiB", "arena"] and "64 MiB  staging slots" in done.stdout


def test_each_limit_that_costs_memory_raises_what_a_configuration_needs(tmp_path: Path) -> None:
    def needed(text: str) -> int:
        file = tmp_path / "offloadd.toml"
        file.write_text(text)
        return sum(need.bytes for need in memory_needs(load_config(file)))

    least = needed("")
    for text in (
        "[arena]\narena_bytes = '2 GiB'",
        "[limits]\nindex_bytes_max = '8 GiB'",
        "[limits]\nsessions_max = 2000",
        "[limits]\nconnections_max = 3000",
        "[limits]\ncalls_max = 1000",
        "[limits]\nblocks_in_flight_max = 1000000",
        "[limits]\nmessage_bytes_max = '4 MiB'",
        "[[volume]]\npath = '/a'",
    ):
        assert needed(text) > least, text


def test_a_formatted_volume_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "volume"
    done = offloadd("volume", "format", path, "--size", "256 MiB", "--slab", "64MiB")
    assert done.returncode == 0, done.stderr
    assert "3 slabs of 64 MiB" in done.stdout
    assert path.stat().st_size == 256 * MIB
    values = json.loads(offloadd("volume", "show", path, "--json").stdout)
    assert (values["volume_bytes"], values["slab_bytes"], values["slab_count"], values["slabs_cut"], values["locked"]) == (256 * MIB, 64 * MIB, 3, 0, False)
    assert values["uuid"] in done.stdout
    text = offloadd("volume", "show", path).stdout
    assert values["uuid"] in text
    assert "3 of 64 MiB: 0 cut" in text


def test_a_file_that_is_no_volume_is_not_formatted_over(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"precious" * 100_000)
    done = offloadd("volume", "format", path, "--size", "256MiB", "--slab", "64MiB", "--force-blocks")
    assert done.returncode == 1
    assert "is not an offloadd volume" in done.stderr
    assert path.read_bytes() == b"precious" * 100_000


def test_no_daemon_is_an_exit_status_of_its_own(tmp_path: Path) -> None:
    done = offloadd("status", "--runtime-dir", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"no daemon is running at {tmp_path}\n")
    done = offloadd("status", OFFLOADD_RUNTIME_DIR=str(tmp_path / "missing"))
    assert (done.returncode, done.stderr) == (3, f"no daemon is running at {tmp_path / 'missing'}\n")


def test_a_running_daemon_tells_its_status(runtime_dir: Path) -> None:
    done = offloadd("status", "--runtime-dir", runtime_dir, "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values == values_of(busy_status())
    assert values["uptime_s"] == 11520.5
    assert values["arena"]["used_bytes"] == 512 * MIB
    assert values["volumes"][0]["recovery_s"] == 0.25
    assert [(path["tier"], path["path"]) for path in values["paths"]] == [("arena", "ddr"), ("volume", "gds")]
    done = offloadd("status", "--runtime-dir", runtime_dir)
    assert done.returncode == 0, done.stderr
    assert "SERVING" in done.stdout.splitlines()[0]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_json_has_every_field_of_the_answer() -> None:
    values = values_of(busy_status())
    renamed = {"uptime": "uptime_s", "recovery": "recovery_s"}

    def names(message: object) -> set[str]:
        return {renamed.get(field.name, field.name) for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]

    assert set(values) == names(admin_pb2.StatusResponse)
    assert set(values["arena"]) == names(admin_pb2.ArenaStatus)
    for name, message in (
        ("volumes", admin_pb2.VolumeStatus),
        ("sessions", admin_pb2.SessionStatus),
        ("workers", admin_pb2.WorkerStatus),
        ("gpus", admin_pb2.GpuStatus),
        ("paths", offload_pb2.PathCapability),
    ):
        assert set(values[name][0]) == names(message)
    assert set(values["paths"][1]["volumes"][0]) == names(offload_pb2.VolumeRates)


def test_the_status_fits_80_columns_and_hides_nothing() -> None:
    text = shown(busy_status())
    assert max(map(len, text.splitlines())) <= 80
    joined = "".join(text.split())
    for fact in (
        "up3h12min",
        "1,966,899of8,000,000blocks",
        "3of512requestsinflightwith8,192of262,144blocksand40GiBof128GiB;12refused",
        "1of1,024sessions",
        "31337",
        "16GiB",
        "50%",
        "1of2serving",
        "/dev/nvme1n1:failed:Input/outputerror",
        "restarting",
        "527MiB",
        "NVIDIAH200",
        "can'tbeused",
        "beef:opendevice'GPU-0123abcd':CUDA_ERROR_OUT_OF_MEMORY",
        "9.1GB/s",
        "6.2GB/s*",
        "cuda:0,/dev/nvme0n1:noscratcharea",
        "123,456",
    ):
        assert fact in joined, fact


def test_a_volume_that_hangs_is_shown_with_what_it_does_not_get_and_why() -> None:
    status = busy_status()
    volume = status.volumes[0]
    volume.reads_breaker = volume.writes_breaker = "open: a probe was not answered in 2 s"
    volume.late_count = 12
    text = shown(status)
    joined = "".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for fact in ("0of2serving", "volume0:readsopen:aprobewasnotansweredin2s", "volume0:writesopen:", "volume0:12jobsthatweresenttoitarelate"):
        assert fact in joined, fact


def test_an_idle_daemon_has_a_status_too() -> None:
    assert "offloadd 0.1.0" in shown(admin_pb2.StatusResponse(version="0.1.0", state="SERVING"))


def test_what_a_client_calls_itself_can_not_steer_the_terminal() -> None:
    status = busy_status()
    status.sessions[0].instance = "\x1b[2J[bold]x[/bold]\n\u202e"
    text = shown(status, width=200)
    assert "\x1b" not in text
    assert "�[2J[bold]x[/bold]��" in text
    assert str(plain("a\tb\x00")) == "a�b�"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (725, "12 min 5 s"), (11_520, "3 h 12 min"), (273_600, "3 d 4 h")])
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
