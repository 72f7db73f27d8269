"""Rows of two results are matched by case; estimates are not judged, and a worse way is worse whatever the speed."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.compare import main
from bench.support.comparison import Basis, Compared, Comparison, Verdict, compare
from bench.support.result import Result
from bench.support.rows import Row
from tests.bench.grid_rows import case, measured, recomputed


def compared(before: list[Row], after: list[Row], noise: float = 0.1) -> Comparison:
    old, new = (Result("restore", "", False, {}, {}, {}, [], rows) for rows in (before, after))
    return compare(old, new, noise=noise)


def one(before: Row, after: Row, noise: float = 0.1) -> Compared:
    (found,) = compared([before], [after], noise).figures
    return found


def row(**changes: Any) -> Row:
    """Without a spread, so that the band is the caller's."""
    return measured(case(), **{"seconds": [0.1, 0.1, 0.1], **changes})


def alone(**changes: Any) -> Row:
    return row(ceiling="", ceiling_gb_per_s=None, ratio=None, **changes)


def test_the_ratio_is_judged_where_both_rows_have_one() -> None:
    slower = one(row(ratio=0.8), row(ratio=0.8, seconds=[0.3] * 3))
    assert slower.verdict is Verdict.WITHIN_NOISE and slower.remarks == ["100 → 300 ms, and the ceiling with it"]
    assert one(row(ratio=0.8), row(ratio=0.8, seconds=[0.105] * 3)).remarks == []
    found = one(row(ratio=0.8), row(ratio=0.6))
    assert (found.verdict, found.basis, found.old, found.new) == (Verdict.WORSE, Basis.RATIO, 0.8, 0.6)
    assert one(row(ratio=0.6), row(ratio=0.8)).verdict is Verdict.BETTER


@pytest.mark.parametrize(("before", "after"), [(alone(), row(seconds=[0.2] * 3)), (row(), alone(seconds=[0.2] * 3)), (alone(), alone(seconds=[0.2] * 3))])
def test_the_median_latency_is_judged_where_not_both_have_a_ratio(before: Row, after: Row) -> None:
    found = one(before, after)
    assert (found.verdict, found.basis, found.unit, found.old, found.new) == (Verdict.WORSE, Basis.VALUE, "ms", 100.0, 200.0)


def test_ratios_to_different_ceilings_are_not_compared() -> None:
    found = one(row(ratio=0.9), row(ratio=0.5, ceiling="a faster one"))
    assert (found.verdict, found.basis) == (Verdict.WITHIN_NOISE, Basis.VALUE)
    assert found.remarks == ["ceiling bare KvikIO reads → a faster one, so the median latency is compared"]


@pytest.mark.parametrize("in_new", [False, True])
def test_the_spread_of_either_row_widens_the_band(in_new: bool) -> None:
    """Half of p75 - p25 is 0.3 of the median here."""
    spread = alone(seconds=[0.08, 0.08, 0.1, 0.14, 0.14])
    for seconds, expected in ((0.129, Verdict.WITHIN_NOISE), (0.131, Verdict.BETTER if in_new else Verdict.WORSE)):
        other = alone(seconds=[seconds] * 5)
        found = one(other, spread) if in_new else one(spread, other)
        assert found.noise == pytest.approx(0.3) and found.verdict is expected


def test_a_ratio_is_judged_by_its_own_spread_and_not_by_that_of_requests_that_queue() -> None:
    """Eight requests in flight on one disk: each waits for others, so that single latencies differ by half, and the rate by hardly anything."""
    queued = [0.06, 0.1, 0.16, 0.24, 0.3]
    before, after = row(ratio=0.84, ratio_spread=0.01, seconds=queued), row(ratio=0.67, ratio_spread=0.02, seconds=queued)
    found = one(before, after)
    assert (found.verdict, found.noise) == (Verdict.WORSE, 0.1)
    # Where the pairs themselves differ so much, it means nothing.
    assert one(before, msgspec.structs.replace(after, ratio_spread=0.3)).verdict is Verdict.WITHIN_NOISE
    # A result of before that tells none is judged as widely as before.
    assert one(msgspec.structs.replace(before, ratio_spread=None), after).noise == pytest.approx(0.4375)


GDS, BOUNCED = {"gds_nvfs": 1.0}, {"cufile_posix": 1.0}


@pytest.mark.parametrize(
    ("before", "after", "expected", "remark"),
    [
        (GDS, BOUNCED, Verdict.WORSE, "way gds_nvfs 100.0% → cufile_posix 100.0%"),
        (GDS, {"gds_nvfs": 0.9, "cufile_posix": 0.1}, Verdict.WORSE, "way gds_nvfs 100.0% → cufile_posix 10.0% + gds_nvfs 90.0%"),
        (GDS, {}, Verdict.WORSE, "way gds_nvfs 100.0% → unproven"),
        (GDS, {"gds_p2p": 1.0}, Verdict.BETTER, "way gds_nvfs 100.0% → gds_p2p 100.0%"),
        (BOUNCED, GDS, Verdict.BETTER, "way cufile_posix 100.0% → gds_nvfs 100.0%"),
        (BOUNCED, {"kvikio_posix": 1.0}, Verdict.BETTER, "way cufile_posix 100.0% → kvikio_posix 100.0%"),
        (BOUNCED, BOUNCED, Verdict.BETTER, None),
    ],
)
def test_less_by_the_way_asked_for_is_worse_even_if_faster(before: dict[str, float], after: dict[str, float], expected: Verdict, remark: str | None) -> None:
    found = one(row(ratio=0.5, proven=before), row(ratio=0.9, proven=after))
    assert found.verdict is expected and (found.remarks[:1] == [remark] if remark else not found.remarks)
    assert (expected is Verdict.WORSE) is ("less went by gds, which was asked for" in found.remarks)


def test_estimates_are_never_judged() -> None:
    before, after = recomputed(case(path="recompute"), 9000), recomputed(case(path="recompute"), 900)
    assert one(before, after).verdict is Verdict.ESTIMATE
    real = Row(case(path="recompute"), proven={"recompute": 1.0}, request_count=1, seconds=[9.0], gb_per_s=1.0)
    assert one(before, real).verdict is Verdict.ESTIMATE and one(real, after).verdict is Verdict.ESTIMATE


def test_a_row_that_can_be_run_no_more_is_worse_and_one_that_never_could_is_not() -> None:
    ran, skipped = row(), Row(case(), skipped="no GPU")
    lost = compared([ran], [skipped])
    assert lost.lost == [f"{case().name}: was run, is not: no GPU"] and not lost.skips and lost.worse
    gained = compared([skipped], [ran])
    assert not gained.lost and not gained.worse
    assert compared([skipped], [ran]).skips == [f"{case().name}: is run, was not: no GPU"]
    assert compared([skipped], [Row(case(), skipped="no room")]).skips == [f"{case().name}: was not run and is not, for another reason: no GPU → no room"]
    both = compared([skipped, row()], [skipped, row()])
    assert both.skips == [] and len(both.figures) == 1 and not both.worse


def test_rows_are_matched_by_case_and_repeated_ones_in_their_order() -> None:
    other = measured(case(tokens=4096))
    found = compared([row(), row(ratio=0.5), other], [row(), row(ratio=0.9), measured(case(tokens=16))])
    assert [(figure.name, figure.verdict) for figure in found.figures] == [
        (case().name, Verdict.WITHIN_NOISE),
        (f"{case().name} #2", Verdict.BETTER),
    ]
    assert (found.only_old, found.only_new) == ([case(tokens=4096).name], [case(tokens=16).name])


def write(path: Path, *rows: Row) -> str:
    record = {"name": "restore", "question": "", "tiny": False, "machine": {}, "facts": {}, "notes": {}, "figures": []}
    path.write_text(json.dumps(record | {"rows": [msgspec.to_builtins(one_row) for one_row in rows]}))
    return str(path)


def test_the_command_ends_in_one_when_a_row_is_worse_and_tells_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", row(ratio=0.8), measured(case(tokens=16)))
    same = write(tmp_path / "same.json", row(ratio=0.79), measured(case(tokens=16)))
    lost = write(tmp_path / "lost.json", row(ratio=0.79), Row(case(tokens=16), skipped="no [GPU]"))
    worse = write(tmp_path / "worse.json", row(ratio=0.8, proven=BOUNCED), measured(case(tokens=16)))
    assert main([old, same]) == 0
    assert main([old, lost]) == 1
    assert "lost: " in capsys.readouterr().out and main([old, lost]) == 1
    assert "was run, is not: no [GPU]" in " ".join(capsys.readouterr().out.split())
    assert main([old, worse]) == 1 and "less went by gds" in " ".join(capsys.readouterr().out.split())
    assert main([old, lost, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lost"] == [f"{case(tokens=16).name}: was run, is not: no [GPU]"]
    nothing = write(tmp_path / "nothing.json", measured(case(tokens=4096)))
    assert main([old, nothing]) == 2 and "2 and 1 rows" in capsys.readouterr().err
