"""What counts as worse between two results, and what is said before the figures."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.compare import main
from bench.support.comparison import Basis, Comparison, Verdict, compare, verdict
from bench.support.report import Figure, Report, Target
from bench.support.result import ResultError, read_result, spreads, stable_name

MACHINE = {"cpu": "a processor", "cores": 2, "file_system": "ext4", "commit": "aaaa", "date": "2026-01-01", "load_average": 0.1}


def write(path: Path, *figures: Figure, **changes: Any) -> Path:
    record = {"name": "restore", "question": "Is it so?", "tiny": False, "machine": MACHINE, "facts": {}, "notes": {}}
    path.write_text(json.dumps({**record, "figures": [{**asdict(figure), "met": figure.met} for figure in figures], **changes}))
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old.json"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new.json"


def compared(tmp_path: Path, before: list[Figure], after: list[Figure], noise: float = 0.1) -> Comparison:
    return compare(read_result(write(tmp_path / "before.json", *before)), read_result(write(tmp_path / "after.json", *after)), noise=noise)


def verdict_of(tmp_path: Path, before: Figure, after: Figure, noise: float = 0.1) -> Verdict:
    (found,) = compared(tmp_path, [before], [after], noise).figures
    return found.verdict


@pytest.mark.parametrize(
    ("before", "after", "up", "expected"),
    [
        (1.0, 1.09, False, Verdict.WITHIN_NOISE),
        (1.0, 1.11, False, Verdict.WORSE),
        (1.0, 1.11, True, Verdict.BETTER),
        (1.11, 1.0, True, Verdict.WORSE),
        (1.11, 1.0, False, Verdict.BETTER),
        (1.09, 1.0, True, Verdict.WITHIN_NOISE),
        (0.0, 0.0, False, Verdict.WITHIN_NOISE),
        (0.0, 0.001, False, Verdict.WORSE),
        (0.001, 0.0, False, Verdict.BETTER),
        (-1.0, 1.0, False, Verdict.WORSE),
        (-1.0, -1.05, True, Verdict.WITHIN_NOISE),
        (-1.0, -2.0, True, Verdict.WORSE),
    ],
)
def test_a_change_beyond_the_band_is_better_or_worse_by_its_direction(before: float, after: float, up: bool, expected: Verdict) -> None:
    assert verdict(before, after, noise=0.1, up=up) is expected


@pytest.mark.parametrize("unit", ["GB/s", "blocks/s", "GB", "×"])
def test_more_of_a_rate_is_better(tmp_path: Path, unit: str) -> None:
    assert verdict_of(tmp_path, Figure("it", 1, unit), Figure("it", 2, unit)) is Verdict.BETTER
    assert verdict_of(tmp_path, Figure("it", 2, unit), Figure("it", 1, unit)) is Verdict.WORSE


@pytest.mark.parametrize("unit", ["ms", "ms max", "µs", "s", "s/GB", "B", "MiB", "cores"])
def test_more_of_a_cost_is_worse(tmp_path: Path, unit: str) -> None:
    assert verdict_of(tmp_path, Figure("it", 1, unit), Figure("it", 2, unit)) is Verdict.WORSE
    assert verdict_of(tmp_path, Figure("it", 2, unit), Figure("it", 1, unit)) is Verdict.BETTER


def test_a_target_says_which_way_is_better_whatever_the_unit(tmp_path: Path) -> None:
    target = Target(5.0, at_least=False)
    assert verdict_of(tmp_path, Figure("it", 1, "×", target=target), Figure("it", 2, "×", target=target)) is Verdict.WORSE
    assert verdict_of(tmp_path, Figure("it", 1, "hops", target=target), Figure("it", 2, "hops", target=target)) is Verdict.WORSE


def test_a_unit_without_direction_is_not_judged(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, [Figure("it", 1, "hops")], [Figure("it", 9, "hops")]).figures
    assert found.verdict is Verdict.NOT_COMPARABLE and "'hops'" in found.remarks[0]


def test_figures_in_other_units_are_not_judged(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, [Figure("it", 1, "s")], [Figure("it", 1000, "ms")]).figures
    assert found.verdict is Verdict.NOT_COMPARABLE and found.remarks == ["unit s → ms"]


def test_the_ratio_to_the_ceiling_is_judged_and_not_the_value(tmp_path: Path) -> None:
    """A machine half as fast, with its ceiling, is no regression; a lower ratio on one twice as fast is."""
    before = Figure("it", 2.0, "GB/s", ceiling=2.5, ratio=0.8)
    (slower,) = compared(tmp_path, [before], [Figure("it", 1.0, "GB/s", ceiling=1.25, ratio=0.8)]).figures
    assert (slower.verdict, slower.basis, slower.old, slower.new) == (Verdict.WITHIN_NOISE, Basis.RATIO, 0.8, 0.8)
    assert verdict_of(tmp_path, before, Figure("it", 4.0, "GB/s", ceiling=8.0, ratio=0.5)) is Verdict.WORSE


def test_the_direction_of_a_ratio_comes_from_a_target_on_it_and_not_from_one_on_the_value(tmp_path: Path) -> None:
    on_value, on_ratio = Target(9.0, at_least=False), Target(2.0, at_least=False, on_ratio=True)
    for target, expected in ((on_value, Verdict.BETTER), (on_ratio, Verdict.WORSE), (None, Verdict.BETTER)):
        before, after = Figure("it", 1.0, "ms", ceiling=1.0, ratio=0.5, target=target), Figure("it", 1.0, "ms", ceiling=1.0, ratio=0.9, target=target)
        assert verdict_of(tmp_path, before, after) is expected


@pytest.mark.parametrize("in_new", [False, True])
def test_the_value_is_judged_where_only_one_has_a_ratio(tmp_path: Path, in_new: bool) -> None:
    ratios = (None, 1.0) if in_new else (1.0, None)
    (found,) = compared(tmp_path, [Figure("it", 2.0, "GB/s", ratio=ratios[0])], [Figure("it", 1.0, "GB/s", ratio=ratios[1])]).figures
    assert (found.basis, found.verdict) == (Basis.VALUE, Verdict.WORSE)


def test_a_ceiling_of_other_figures_is_told_and_not_judged(tmp_path: Path) -> None:
    before = [Figure("raw", 2.0, "GB/s"), Figure("restore", 1.8, "GB/s", ceiling=2.0, ratio=0.9), Figure("a call", 2.0, "ms")]
    after = [Figure("raw", 1.0, "GB/s"), Figure("restore", 0.9, "GB/s", ceiling=1.0, ratio=0.9), Figure("a call", 4.0, "ms")]
    found = {figure.name: figure.verdict for figure in compared(tmp_path, before, after).figures}
    assert found == {"raw": Verdict.CEILING, "restore": Verdict.WITHIN_NOISE, "a call": Verdict.WORSE}


@pytest.mark.parametrize(
    "detail",
    [
        {"count": 9, "median": 10.0, "p25": 8.0, "p75": 14.0},
        {"ms_count": 9, "ms_median": 10.0, "ms_p25": 8.0, "ms_p75": 14.0},
        {"median": 10.0, "mad": 3.0},
        {"cpu_ms_median": 10.0, "cpu_ms_mad": 3.0, "wall_ms_median": 10.0, "wall_ms_mad": 0.1},
    ],
)
@pytest.mark.parametrize("in_new", [False, True])
def test_a_spread_in_either_result_widens_the_band(tmp_path: Path, detail: dict[str, Any], in_new: bool) -> None:
    """Half the interquartile range, or the MAD, is 0.3 of the median here."""
    details = ({}, detail) if in_new else (detail, {})
    for value, expected in ((12.9, Verdict.WITHIN_NOISE), (13.1, Verdict.WORSE)):
        (found,) = compared(tmp_path, [Figure("it", 10.0, "ms", detail=details[0])], [Figure("it", value, "ms", detail=details[1])]).figures
        assert found.noise == pytest.approx(0.3) and found.verdict is expected


def test_a_narrow_spread_does_not_undercut_the_least_band(tmp_path: Path) -> None:
    detail: dict[str, Any] = {"median": 10.0, "p25": 9.99, "p75": 10.01}
    (found,) = compared(tmp_path, [Figure("it", 10.0, "ms", detail=detail)], [Figure("it", 10.9, "ms", detail=detail)]).figures
    assert found.noise == 0.1 and found.verdict is Verdict.WITHIN_NOISE


def test_counts_shares_and_words_are_no_quantiles() -> None:
    detail: dict[str, Any] = {
        "ms_count": 7,
        "ms_median": 2.0,
        "ms_p99_9": 4.0,
        "ms_max": 5.0,
        "io_share": 0.5,
        "wall_p95": 1.0,
        "p50_path": "gds",
        "p95": "no number",
    }
    (found,) = spreads(Figure("it", 1.0, "ms", detail=detail))
    assert found.prefix == "ms_" and found.quantiles == {50.0: 2.0, 99.9: 4.0, 100.0: 5.0} and found.relative is None


def test_measured_numbers_in_names_do_not_part_figures(tmp_path: Path) -> None:
    found = compared(tmp_path, [Figure("find 512 (median 0.093, p99 0.121)", 1, "ms")], [Figure("find 512 (median 0.091, p99 0.3)", 1, "ms")])
    assert [figure.name for figure in found.figures] == ["find 512"] and not found.only_old
    assert stable_name(Figure("reserve 512 (answer: full), 2.5 MiB", 1, "ms")) == "reserve 512 (answer: full), 2.5 MiB"


def test_figures_of_one_name_are_paired_in_their_order(tmp_path: Path) -> None:
    found = compared(tmp_path, [Figure("it", 1, "ms"), Figure("it", 9, "ms")], [Figure("it", 1, "ms"), Figure("it", 1, "ms")])
    assert [(figure.name, figure.verdict) for figure in found.figures] == [("it", Verdict.WITHIN_NOISE), ("it #2", Verdict.BETTER)]


def test_a_missed_target_and_another_path_are_remarked(tmp_path: Path) -> None:
    target = Target(5.0, at_least=False)
    before = Figure("it", 4.9, "ms", target=target, detail={"path": "gds_nvfs"})
    (found,) = compared(tmp_path, [before], [Figure("it", 5.1, "ms", target=target, detail={"path": "cufile_posix"})]).figures
    assert found.verdict is Verdict.WITHIN_NOISE and found.remarks == ["target met → missed", "path gds_nvfs → cufile_posix"]


@pytest.mark.parametrize(("after", "status"), [(1.0, 0), (0.5, 0), (1.05, 0), (1.5, 1)])
@pytest.mark.parametrize("json_wanted", [False, True])
def test_the_exit_status_is_one_exactly_when_a_figure_is_worse(
    old: Path, new: Path, after: float, status: int, json_wanted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write(old, Figure("steady", 1, "ms"), Figure("it", 1.0, "ms"))
    write(new, Figure("steady", 1, "ms"), Figure("it", after, "ms"))
    assert main([str(old), str(new), *(["--json"] if json_wanted else [])]) == status
    out = capsys.readouterr().out
    if json_wanted:
        assert json.loads(out)["worse"] is (status == 1)


def test_a_wider_band_is_taken_from_the_command_line(old: Path, new: Path) -> None:
    write(old, Figure("it", 1.0, "ms"))
    write(new, Figure("it", 1.5, "ms"))
    assert main([str(old), str(new), "--noise", "0.6"]) == 0


@pytest.mark.parametrize("text", ["-0.1", "nan", "inf", "much"])
def test_a_band_that_is_none_is_refused(old: Path, new: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([str(old), str(new), f"--noise={text}"])
    assert refused.value.code == 2 and text in capsys.readouterr().err


def test_what_else_differs_is_said_before_the_figures(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(old, Figure("it [a]", 1.0, "ms"), Figure("gone", 1.0, "ms"), facts={"blocks": 1000})
    machine = MACHINE | {"file_system": "xfs", "gpu": "one", "commit": "bbbb", "date": "2027-01-01", "load_average": 3.0}
    write(new, Figure("it [a]", 1.0, "ms"), Figure("come", 1.0, "ms"), machine=machine, facts={"blocks": 9}, tiny=True)
    assert main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    head, _, rest = out.partition("it [a]")
    cautions = [line.removeprefix("CAUTION ") for line in head.splitlines() if line.startswith("CAUTION")]
    assert cautions == [
        "the new result is of a tiny run, whose figures mean nothing",
        "machine: file_system was ext4, is xfs",
        "machine: gpu was untold, is one",
        "fact: blocks was 1,000, is 9",
    ]
    assert "commit aaaa" in head and "commit bbbb" in head
    assert "only in the old result: gone" in rest and "only in the new result: come" in rest


def test_a_figure_that_can_be_measured_no_more_is_worse_and_one_that_was_not_asked_for_is_not(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(old, Figure("it", 1.0, "ms"), Figure("restore by gds", 1.0, "GB/s"))
    write(new, Figure("it", 1.0, "ms"))
    assert main([str(old), str(new)]) == 0
    assert "only in the old result: restore by gds" in capsys.readouterr().out
    for fact in ("skipped: restore by gds", "failed: gds"):
        write(new, Figure("it", 1.0, "ms"), facts={fact: "3 of 8 slices bounced"})
        assert main([str(old), str(new)]) == 1
        said = capsys.readouterr().out
        assert "lost: restore by gds: was measured, is not" in said and "is 3 of 8 slices bounced" in said and "only in the old" not in said
        # It could not be before.
        write(old, Figure("it", 1.0, "ms"), Figure("restore by gds", 1.0, "GB/s"), facts={fact: "no GPU"})
        assert main([str(old), str(new)]) == 0
        capsys.readouterr()
        write(old, Figure("it", 1.0, "ms"), Figure("restore by gds", 1.0, "GB/s"))


def test_the_table_says_that_ratios_are_compared(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (old, new):
        write(path, Figure("it", 1.0, "GB/s", ceiling=2.0, ratio=0.5))
    main([str(old), str(new)])
    assert "compared by that ratio and not by their value" in capsys.readouterr().out
    for path in (old, new):
        write(path, Figure("it", 1.0, "GB/s"))
    main([str(old), str(new)])
    assert "compared by that ratio" not in capsys.readouterr().out


def test_json_holds_what_the_table_shows(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(old, Figure("it", 2.0, "ms"), Figure("none", 0.0, "B"), Figure("gone", 1.0, "ms"))
    write(new, Figure("it", 3.0, "ms"), Figure("none", 0.0, "B"), machine=MACHINE | {"cores": 4})
    assert main([str(old), str(new), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["figures"][0] == {
        "name": "it", "unit": "ms", "basis": "value", "old": 2.0, "new": 3.0, "noise": 0.1, "verdict": "worse", "remarks": [], "ratio": 1.5,
    }  # fmt: skip
    assert record["figures"][1]["ratio"] is None
    assert (record["warnings"], record["only_old"], record["only_new"]) == (["machine: cores was 2, is 4"], ["gone"], [])


def with_figure(figure: str) -> str:
    return f'{{"name": "restore", "question": "", "tiny": false, "machine": {{}}, "facts": {{}}, "notes": {{}}, "figures": [{figure}]}}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "no result of a benchmark"),
        ("[1]", "Expected `object`"),
        ("{}", "missing required field"),
        (with_figure('{"name": "it", "unit": "ms"}'), "`value`"),
        (with_figure('{"name": "it", "unit": "ms", "value": NaN}'), "value of 'it' is nan"),
        (with_figure('{"name": "it", "unit": "ms", "value": 1, "detail": 3}'), "the detail of 'it' is 3"),
    ],
)
def test_a_file_that_is_no_result_ends_in_status_two_and_the_reason(
    old: Path, new: Path, text: str | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(old, Figure("it", 1.0, "ms"))
    if text is not None:
        new.write_text(text)
    for arguments in ([str(old), str(new)], [str(new), str(old)]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert str(new) in err and why in err


def test_bytes_that_are_no_text_end_in_status_two(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(old, Figure("it", 1.0, "ms"))
    new.write_bytes(b"\xff\xfe\x00")
    assert main([str(old), str(new)]) == 2 and "no result of a benchmark" in capsys.readouterr().err


def test_a_target_on_a_ratio_that_is_missing_is_refused(new: Path) -> None:
    text = write(new, Figure("it", 1.0, "ms", ratio=0.5, target=Target(0.9, on_ratio=True))).read_text()
    new.write_text(text.replace('"ratio": 0.5', '"ratio": null'))
    with pytest.raises(ResultError, match="there is no ratio"):
        read_result(new)


def test_results_with_nothing_in_common_end_in_status_two(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(old, Figure("it", 1.0, "ms"))
    write(new, Figure("it", 1.0, "ms"), name="lookup")
    assert main([str(old), str(new)]) == 2 and "is a result of restore" in capsys.readouterr().err
    write(new, Figure("that", 1.0, "ms"))
    assert main([str(old), str(new)]) == 2 and "no figure in common" in capsys.readouterr().err


def test_what_a_report_writes_is_read_back_whole(tmp_path: Path) -> None:
    report = Report("sample", "Is it so?", argparse.Namespace(dir=tmp_path, tiny=False, results=tmp_path))
    report.facts["fio"] = "not installed"
    report.notes["path"] = "two\nlines"
    report.add(Figure("rate", 2.0, "GB/s", 1.7, "sketch", 2.5, 0.8, Target(0.95, on_ratio=True), {"ms_median": 3.0, "path": "gds", "verified": True}))
    report.finish()
    result = read_result(tmp_path / "sample.json")
    assert result.figures == report.figures and result.figures[0].met is False
    assert (result.name, result.facts, result.notes) == ("sample", report.facts, {"path": ["two", "lines"]})
