"""A file whose rows can't be true is refused, by the row and the reason; what rows say of themselves."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.support.result import Result, ResultError, read_result
from bench.support.row_groups import groups, lines
from bench.support.rows import QUANTILES_MAX, Operation, Row, estimates_of, quantiles_of, speedup
from tests.bench.grid_rows import case, grid, measured, recomputed


def write(path: Path, *rows: Any) -> Path:
    record = {"name": "restore", "question": "", "tiny": False, "machine": {}, "facts": {}, "notes": {}, "figures": []}
    path.write_text(json.dumps(record | {"rows": [msgspec.to_builtins(row) for row in rows]}))
    return path


def read(path: Path) -> Result:
    return read_result(path)


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [*grid(sizes=(1024,), models=1), *grid(gpu=False, sizes=(1024,), models=1)]
    assert read(write(tmp_path / "it.json", *rows)).rows == rows


def test_a_file_without_rows_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "it.json")
    record = json.loads(path.read_text())
    del record["rows"]
    path.write_text(json.dumps(record))
    assert read(path).rows == []


SECONDS = [0.001, 0.002, 0.003]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seconds": []}, "has no seconds"),
        ({"seconds": [0.001, math.nan]}, "seconds hold nan"),
        ({"seconds": [0.001, math.inf]}, "seconds hold inf"),
        ({"seconds": [0.0, 0.1]}, "seconds hold 0.0"),
        ({"seconds": [0.002, 0.001]}, "seconds don't ascend: 0.001 after 0.002"),
        ({"seconds": [0.1] * (QUANTILES_MAX + 1), "request_count": 900}, "202 seconds, more than 201"),
        ({"seconds": SECONDS, "request_count": 2}, "request_count is 2, and there are 3 seconds"),
        ({"gb_per_s": math.nan}, "gb_per_s is nan"),
        ({"gb_per_s": 0.0}, "gb_per_s is 0 of a row that was measured"),
        ({"cpu_s_per_gb": -1.0}, "cpu_s_per_gb is -1"),
        ({"memory_bytes_per_byte": math.inf}, "memory_bytes_per_byte is inf"),
        ({"stages": {"io": math.nan}}, "stage io is nan"),
        ({"proven": {"gds_nvfs": 0.5, "cufile_posix": 0.4}}, "the shares of its ways sum to 0.9, not to 1"),
        ({"proven": {"gds_nvfs": 1.5, "cufile_posix": -0.5}}, "the share of gds_nvfs is 1.5"),
        ({"proven": {"gds_nvfs": 1.0, "cufile_posix": 0.0}}, "the share of cufile_posix is 0.0"),
        ({"proven": {"gds_nvfs": math.nan}}, "the share of gds_nvfs is nan"),
        ({"estimated": True}, "it is estimated and yet proven"),
        ({"ceiling": ""}, "the ceiling of 24.0 GB/s has no name"),
        ({"ceiling_gb_per_s": None}, "is to no ceiling"),
        ({"ceiling_gb_per_s": 0.0}, "ceiling_gb_per_s is 0.0"),
        ({"ratio": math.nan}, "ratio is nan"),
        ({"ratio_spread": math.nan}, "ratio_spread is nan"),
        ({"ratio": None, "ratio_spread": 0.1}, "the ratio_spread 0.1 is of no ratio"),
        ({"case": {"operation": "move"}}, "Invalid enum value 'move'"),
        ({"case": {"tokens": 0}}, "tokens is 0, at least 1 is needed"),
        ({"case": {"queue_depth": 0}}, "queue_depth is 0"),
        ({"case": {"volume_count": -1}}, "volume_count is -1"),
        ({"case": {"path": ""}}, "path is empty"),
        ({"case": {"tokens": 1025}}, "1025 tokens don't fill 64 blocks of 16 tokens"),
        ({"case": {"tokens": 1008}}, "1008 tokens don't fill 64 blocks of 16 tokens"),
        ({"case": {"speed": 1}}, "unknown field `speed`"),
        ({"speed": 1}, "unknown field `speed`"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused_by_file_and_row(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    good = measured(case())
    bad = msgspec.to_builtins(good)
    bad = {**bad, **changes, "case": {**bad["case"], **changes.get("case", {})}}
    with pytest.raises(ResultError) as refused:
        read(write(tmp_path / "it.json", good, bad))
    assert str(tmp_path / "it.json") in str(refused.value) and "row 2" in str(refused.value) and why in str(refused.value)


@pytest.mark.parametrize("name", [field for field in Row.__struct_fields__ if field not in ("case", "skipped")])
def test_a_row_that_was_skipped_has_nothing_else(tmp_path: Path, name: str) -> None:
    full = msgspec.structs.replace(measured(case()), memory_note="why", ratio_spread=0.1, estimated=True)
    assert read(write(tmp_path / "it.json", Row(case(), skipped="no GPU"))).rows[0].skipped == "no GPU"
    with pytest.raises(ResultError, match=rf"row 1 .*it was skipped \(no GPU\) and yet has {name}"):
        read(write(tmp_path / "it.json", Row(case(), skipped="no GPU", **{name: getattr(full, name)})))


def test_shares_that_were_rounded_and_an_estimate_without_requests_are_taken(tmp_path: Path) -> None:
    rounded = measured(case(), proven={"gds_nvfs": 0.3333, "gds_p2p": 0.6666})
    assert read(write(tmp_path / "it.json", rounded, recomputed(case(path="recompute"), 9000))).rows[0].is_as_asked


@pytest.mark.parametrize(
    ("path", "proven", "share"),
    [
        ("gds", {"gds_nvfs": 1.0}, 1.0),
        ("gds", {"gds_nvfs": 0.5, "gds_p2p": 0.5}, 1.0),
        ("gds", {"gds_nvfs": 0.9999, "cufile_posix": 0.0001}, 0.9999),
        ("gds", {"bounce": 1.0}, 0.0),
        ("gds", {"kvikio_posix": 1.0}, 0.0),
        ("bounce", {"bounce": 1.0}, 1.0),
        ("ddr", {"ddr": 0.5, "bounce": 0.5}, 0.5),
        ("host", {}, 0.0),
    ],
)
def test_a_row_is_as_asked_only_if_every_byte_is_proven_to_be(path: str, proven: dict[str, float], share: float) -> None:
    row = measured(case(path=path), proven=proven)
    assert row.asked_share == share and row.is_as_asked is (share == 1)


def test_an_engine_on_the_host_and_one_on_a_gpu_are_different_cases() -> None:
    assert case(path="ddr").name != case(path="ddr", gpu_count=0).name


def test_quantiles_keep_the_least_and_the_greatest() -> None:
    kept = quantiles_of([float(value) for value in range(1000, 0, -1)])
    assert len(kept) == QUANTILES_MAX and (kept[0], kept[100], kept[-1]) == (1.0, 501.0, 1000.0) and kept == sorted(kept)
    assert quantiles_of([3.0, 1.0]) == [1.0, 3.0]


def test_groups_hold_every_row_that_was_run_and_estimates_join_each_of_their_model() -> None:
    rows = grid(sizes=(1024, 4096), models=2, wide=True)
    found = groups(rows)
    assert [group.title for group in found] == [
        "Llama-3-8B, TP 1, bf16",
        "Llama-3-8B, TP 1, bf16, 1 GPU, 4 volumes",
        "Llama-3-8B, TP 1, fp8",
        "Llama-3-8B, TP 1, fp8, 1 GPU, 4 volumes",
    ]
    measured_rows = [row for group in found for row in group.rows if not row.estimated]
    assert len(measured_rows) == sum(not row.estimated for row in rows)
    assert [sum(row.estimated for row in group.rows) for group in found] == [2, 2, 2, 2]
    lonely = recomputed(case(path="recompute", model="another"), 9000)
    assert [group.title for group in groups([*rows, lonely])][-1] == "another, TP 1, bf16"


def test_what_runs_beside_parts_groups() -> None:
    assert [group.title for group in groups([measured(case()), measured(case(background="decode"))])] == [
        "Llama-3-8B, TP 1, bf16",
        "Llama-3-8B, TP 1, bf16, beside decode",
    ]


def test_lines_of_one_path_are_told_apart_by_what_differs_and_by_no_more() -> None:
    rows = [measured(one) for one in (case(path="ddr"), case(path="ddr", gpu_count=0), case(path="gds"), case(path="gds", tokens=4096))]
    assert list(lines(rows)) == ["gds", "ddr, of the host", "ddr, of a GPU"]
    evicts = [measured(case(Operation.EVICT, "ddr", ack=ack)) for ack in ("copied", "durable")]
    assert list(lines(evicts)) == ["ddr, copied", "ddr, durable"]


def test_the_speedup_is_of_a_restore_over_the_recompute_of_as_many_tokens() -> None:
    estimate = recomputed(case(path="recompute"), 9000)
    restore, evict, other = measured(case()), measured(case(Operation.EVICT)), measured(case(tokens=4096))
    estimates = estimates_of([estimate, restore, evict, other])
    assert speedup(restore, estimates) == pytest.approx(estimate.seconds[0] / restore.figure.value * 1e3)
    assert speedup(evict, estimates) is None and speedup(other, estimates) is None and speedup(estimate, estimates) is None


def test_a_restore_is_of_as_many_ranks_as_there_are_gpus() -> None:
    found = [case(tensor_parallel=8, gpu_count=gpus).rank_count for gpus in (0, 1, 2, 16)]
    assert found == [1, 1, 2, 8] and case(gpu_count=4).rank_count == 1
