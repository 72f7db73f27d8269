"""The figures of a GPU, run tiny over the stand-ins: every group works, proves its way and can't be taken for a measurement; without a GPU it says why."""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import mps
from bench.gpu.figures import CAUTION, Figures, is_standin
from bench.gpu_figures import GROUPS
from bench.html import main
from bench.support.comparison import compare
from bench.support.gpu_load import KERNELS, SOURCE
from bench.support.report import Report, Target
from bench.support.result import read_result
from bench.support.row_groups import groups

from ..standin.block import CufileMode
from ..standin.build import Paths, build, compiler
from ..standin.controls import Control, environment, wait_until
from ..standin.kernels import build_kernels
from ..standin_tests.conftest import needs
from ..transfer.kernels.devices import gcc

pytestmark = pytest.mark.timeout(1600)

ROOT = Path(__file__).resolve().parents[2]
#: Only ends what would never end: the kernels run on the CPU, and the machine may be busy with other things.
TIMEOUT_S = 1500
#: Text that a group's figures have in their names.
NAMES = {
    "copies": ("gather and scatter by copy engines", "gather and scatter by kernels"),
    "checksums": ("CRC32C of each block by kernels", "combined on the host"),
    "ddr": ("restore without verification by ddr", "restore by ddr", "ceiling of ddr", "stages of evict by ddr"),
    "bounce": ("restore without verification by bounce", "restore by bounce", "ceiling of bounce", "stages of restore by bounce"),
    "gds": ("restore without verification by gds", "restore by gds", "ceiling of gds", "reads by the gds lane"),
    "copied": ("COPIED, over gRPC",),
    "stages": tuple(f"stages of {operation} by {path}" for path in ("ddr", "bounce", "gds") for operation in ("evict", "restore")),
    "decode": tuple(f"decode step p99 beside restores by {path}, without MPS" for path in ("ddr", "bounce", "gds")),
}

Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if gcc() is None:
        pytest.skip("g++ is not installed")
    return build_kernels(tmp_path_factory.mktemp("kernels"), {SOURCE: KERNELS})


@pytest.fixture
def control(tmp_path: Path) -> Control:
    needs("cuda.bindings", "kvikio")
    return Control.create(tmp_path / "control")


@pytest.fixture
def run(tmp_path: Path, paths: Paths, kernels: Path, control: Control) -> Run:
    """The command over the stand-ins: its record, and what it printed."""

    def make(*arguments: str, expected_status: int = 0) -> tuple[dict[str, Any], str]:
        return command(tmp_path, environment(paths, control, kernels=kernels), *arguments, expected_status=expected_status)

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, paths: Paths, kernels: Path) -> tuple[dict[str, Any], str]:
    """A run of all groups on a machine whose MPS control daemon seems to run."""
    needs("cuda.bindings", "kvikio")
    folder = tmp_path_factory.mktemp("whole")
    write_tool(folder, "exit 0")
    variables = environment(paths, Control.create(folder / "control"), kernels=kernels)
    return command(folder, {**variables, "PATH": f"{folder}:{variables['PATH']}"})


def write_tool(folder: Path, script: str) -> None:
    """`nvidia-cuda-mps-control`, as a shell script."""
    tool = folder / mps.CONTROL
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def command(folder: Path, variables: dict[str, str], *arguments: str, expected_status: int = 0) -> tuple[dict[str, Any], str]:
    volumes, results = folder / "volumes", folder / "results"
    asked = [sys.executable, "-m", "bench.gpu_figures", "--tiny", "--dir", str(volumes), "--results", str(results), *arguments]
    done = subprocess.run(asked, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == expected_status, done.stdout + done.stderr
    assert not list(volumes.iterdir()), "volumes were left behind"
    record: dict[str, Any] = json.loads((results / "gpu_figures.json").read_text())
    return record, " ".join(done.stdout.split())


def skipped(record: dict[str, Any]) -> dict[str, str]:
    """What there is no figure of, and why."""
    return {name.removeprefix("skipped: "): why for name, why in record["facts"].items() if name.startswith("skipped: ")}


def named(record: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [figure for figure in record["figures"] if text in figure["name"]]


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_gives_its_figures(whole: tuple[dict[str, Any], str], group: str) -> None:
    record, _ = whole
    for name in NAMES[group]:
        assert named(record, name), f"no figure of {name!r} among {[figure['name'] for figure in record['figures']]}"


def test_every_figure_tells_the_way_that_was_proven(whole: tuple[dict[str, Any], str]) -> None:
    for figure in whole[0]["figures"]:
        assert figure["value"] > 0 and figure["unit"] in ("GB/s", "ms")
        way = figure["detail"]["way"]
        assert way and "none told" not in way
        if "ceiling of" in figure["name"]:
            continue
        for path in ("ddr", "bounce", "gds"):
            # What is claimed of a path is what its proof says.
            if re.search(rf"by (the )?{path}\b", figure["name"]):
                assert re.search(rf"\b{path}(_nvfs)?\b", way), figure["name"]


def test_restores_alone_and_beside_decode_steps_are_rows_that_pages_and_comparisons_take(whole: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    record, said = whole
    path = tmp_path / "gpu_figures.json"
    path.write_text(json.dumps(record))
    result = read_result(path)
    ran = {(row.case.path, row.case.background) for row in result.rows if not row.skipped}
    assert ran == {(one, background) for one in ("ddr", "bounce", "gds") for background in ("", "decode steps")}
    assert all(row.is_as_asked and row.case.model.startswith("stand-in, no speed: ") for row in result.rows)
    by_case = {(row.case.path, row.case.background): row for row in result.rows}
    for one in ("ddr", "bounce", "gds"):
        assert by_case[one, "decode steps"].ceiling_gb_per_s == by_case[one, ""].gb_per_s
    titles = [group.title for group in groups(result.rows)]
    assert len(titles) == 2 and titles[1] == f"{titles[0]}, beside decode steps" and "beside decode steps" in said
    assert main([str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert "beside decode steps" in (tmp_path / "page.html").read_text()
    assert {row.case.name for row in result.rows} <= {compared.name for compared in compare(result, result, noise=0.1).figures}


def test_nothing_over_a_stand_in_can_be_quoted_or_judged(whole: tuple[dict[str, Any], str]) -> None:
    record, said = whole
    assert is_standin(record["facts"]["gpu"]) and record["facts"]["caution"] == CAUTION and CAUTION in said
    for figure in record["figures"]:
        assert figure["name"].startswith("stand-in, no speed: ") and figure["detail"]["caution"] == CAUTION
        assert figure["target"] is None and figure["met"] is None


def test_a_real_gpu_is_judged(tmp_path: Path) -> None:
    report = Report("gpu_figures", "?", argparse.Namespace(dir=tmp_path, tiny=True, results=tmp_path))
    Figures(report, standin=is_standin("NVIDIA H200")).add("a figure", 1.0, "GB/s", way="gds", target=Target(2.0))
    assert report.figures[0].met is False and report.figures[0].name == "a figure" and "caution" not in report.facts


def test_mps_must_be_proven_by_the_driver(whole: tuple[dict[str, Any], str]) -> None:
    # The tool says that the daemon runs, the driver that contexts do not go through it: no figure is called one with MPS.
    assert "do not go through MPS" in skipped(whole[0])["decode step p99 beside restores, with MPS"]
    assert not named(whole[0], "with MPS")


def test_without_the_control_daemon_of_mps_the_command_that_starts_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not in PATH" in mps.why_not() and f"{mps.CONTROL} -d" in mps.why_not()
    write_tool(tmp_path, "echo 'Cannot find MPS control daemon process' >&2; exit 1")
    assert "Cannot find MPS control daemon process" in mps.why_not() and f"{mps.CONTROL} -d" in mps.why_not()
    write_tool(tmp_path, 'read question; test "$question" = get_server_list')
    assert mps.why_not() == ""


def test_gds_is_not_claimed_where_cufile_bounces_and_kvikio_alone_is_told_as_what_it_is(run: Run, control: Control) -> None:
    control.cufile_mode = CufileMode.COMPAT
    record, _ = run("--only", "gds", "stages", "decode")
    why = skipped(record)
    for name in ("640 KiB blocks, cross-layer: restore by gds", "640 KiB blocks, cross-layer: stages of evict and restore by gds, end to end"):
        assert "bounced through POSIX" in why[name]
    assert "bounced through POSIX" in why["decode step p99 beside restores by gds, without MPS"]
    assert not [figure for figure in record["figures"] if " by gds" in figure["name"] or "gds lane" in figure["name"]]
    (bare, _) = named(record, "bare KvikIO in compat mode")
    assert "kvikio_posix" in bare["detail"]["way"] and "gds_" not in bare["detail"]["way"]
    assert named(record, "stages of restore by bounce") and named(record, "decode step p99 beside restores by ddr")


@pytest.mark.parametrize("group", ["gds", "decode", "stages"])
def test_gds_that_begins_to_bounce_gives_no_figure(run: Run, control: Control, group: str) -> None:
    found: list[dict[str, Any]] = []
    # The lane stands by then: opened by one read, and its way proven by one of each block.
    with control.hang("cuFileRead", skip=8, times=1) as fault:
        thread = threading.Thread(target=lambda: found.append(run("--only", group)[0]))
        thread.start()
        wait_until(lambda: fault.waiting_now == 1, "a read of the gds lane", timeout_s=TIMEOUT_S)
        control.cufile_mode = CufileMode.COMPAT
    thread.join()
    (record,) = found
    why = " ".join(skipped(record).values())
    # The whole daemon, which was asked for this path and no other, refuses it or says of each block that it was not moved.
    assert ("WRONG_PATH" in why or "gds" in why) if group == "stages" else "slices bounced" in why
    assert not [figure for figure in record["figures"] if "cross-layer: restore by gds" in figure["name"] or "beside restores by gds" in figure["name"]]
    assert not [figure for figure in record["figures"] if " by gds" in figure["name"] and "end to end" in figure["name"]]
    assert group != "stages" or named(record, "stages of restore by bounce")


def test_without_a_gpu_every_group_says_why_and_the_record_is_written(tmp_path: Path) -> None:
    # No driver here, or none of the GPUs that are.
    record, said = command(tmp_path, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    why = skipped(record)
    assert [name.split()[0] for name in why] == list(GROUPS) and all(why.values())
    assert record["figures"] == []
    for group in GROUPS:
        assert f"skipped: {group} (" in said


def test_a_gpu_that_is_not_there_is_named(run: Run) -> None:
    record, _ = run("--device", "cuda:7", "--only", "ddr")
    (why,) = skipped(record).values()
    assert "cuda:7" in why and "cuda:0 GPU-" in why


def test_another_gpu_of_the_node_is_measured(run: Run, whole: tuple[dict[str, Any], str]) -> None:
    record, _ = run("--device", "cuda:1", "--only", "ddr")
    assert record["facts"]["gpu_uuid"] != whole[0]["facts"]["gpu_uuid"] and named(record, "restore by ddr")


def test_a_group_that_fails_costs_no_other_its_figures(run: Run, control: Control) -> None:
    control.fail("cuIpcOpenMemHandle", 2, times=1)
    record, _ = run("--only", "ddr", "bounce", expected_status=1)
    assert "OUT_OF_MEMORY" in record["facts"]["failed: ddr"]
    assert named(record, "restore by bounce")


def test_an_arena_that_a_mover_can_not_page_lock_is_told_with_its_figures(run: Run, control: Control) -> None:
    # After the benchmark's own and two with which the mover measures copies.
    with control.fail("cuMemHostRegister", 304, skip=3, times=1) as fault:
        record, _ = run("--only", "ddr")
        assert fault.hits == 1
    ways = [figure["detail"]["way"] for figure in named(record, "cross-layer: restore by ddr")]
    assert ways and all("NOT page-locked" in way for way in ways)
