"""The grid on a machine with GPUs, those of the stand-ins: every path runs through the real daemon, and its rows say which way the bytes went.

Figures over stand-ins mean nothing and are not looked at.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from bench.support.rows import Operation, Row

from ..standin.block import CufileMode
from ..standin.build import build, compiler
from ..standin.controls import Control, environment
from ..standin.kernels import build_kernels
from ..standin_tests.conftest import needs
from ..transfer.kernels.devices import gcc

ROOT = Path(__file__).resolve().parents[2]
GRID = ["--part", "grid", "--tiny", "--tokens", "32", "--depths", "2", "--rounds", "1"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if compiler() is None or gcc() is None:
        pytest.skip("gcc or g++ is not installed")
    folder = tmp_path_factory.mktemp("standin")
    build(folder)
    return folder, build_kernels(folder)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = Control.create(tmp_path / "control")
    yield control
    control.reset()


@pytest.fixture
def run_grid(built: tuple[Path, Path], tmp_path: Path, control: Control) -> Callable[..., list[Row]]:
    needs("cuda.bindings", "kvikio")
    folder, kernels = built

    def run(*options: str) -> list[Row]:
        command = [sys.executable, "-m", "bench.restore_latency", *GRID, "--dir", str(tmp_path / "volumes"), "--results", str(tmp_path / "results"), *options]
        variables = environment(build(folder), control, kernels=kernels)
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        record = json.loads((tmp_path / "results" / "restore_latency.json").read_text())
        return msgspec.convert(record["rows"], list[Row])

    return run


def test_every_path_of_a_gpu_goes_the_way_that_its_row_proves(run_grid: Callable[..., list[Row]]) -> None:
    rows = [row for row in run_grid("--gpus", "2") if not row.estimated]
    assert [row.skipped for row in rows if row.skipped] == []
    assert {(row.case.path, row.case.operation, row.case.gpu_count) for row in rows} == {
        *((path, operation, gpus) for path in ("gds", "bounce", "ddr") for operation in Operation for gpus in (1, 2)),
        *((path, operation, 0) for path in ("ddr", "host") for operation in Operation),
    }
    assert {(row.case.path, *row.proven.items()) for row in rows} == {
        (path, (way, 1.0)) for path, way in (("gds", "gds_nvfs"), ("bounce", "bounce"), ("ddr", "ddr"), ("host", "host"))
    }
    for row in rows:
        assert row.ceiling and row.ceiling_gb_per_s and row.ratio, row.case.name
    assert {row.ceiling for row in rows if row.case.path == "gds"} == {"bare KvikIO reads", "bare KvikIO writes and a sync"}


def test_a_machine_whose_cufile_bounces_has_no_rows_of_gds_and_says_why(run_grid: Callable[..., list[Row]], control: Control) -> None:
    control.cufile_mode = CufileMode.COMPAT
    rows = run_grid("--gpus", "1", "--paths", "gds", "bounce")
    assert {row.case.path: bool(row.skipped) for row in rows} == {"gds": True, "bounce": False}
    assert all("bounced through POSIX" in row.skipped and not row.seconds and not row.proven for row in rows if row.case.path == "gds")
