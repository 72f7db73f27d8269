"""What a record says of its figures."""

import argparse
import json
from pathlib import Path

import pytest

from bench.support.report import Figure, Report, Target
from bench.support.stats import Paired, Summary
from bench.support.workload import WORKLOADS, Blocks, load_workload


def test_a_target_on_the_ratio_does_not_look_at_the_value() -> None:
    target = Target(0.95, on_ratio=True)
    assert Figure("restore", 9.0, "GB/s", ratio=0.94, target=target).met is False
    assert Figure("restore", 0.1, "GB/s", ratio=0.95, target=target).met is True


def test_a_limit_from_above_is_met_at_the_limit_and_missed_beyond() -> None:
    target = Target(5.0, at_least=False)
    assert Figure("pause", 5.0, "ms", target=target).met is True
    assert Figure("pause", 5.01, "ms", target=target).met is False
    assert Figure("pause", 99.0, "ms").met is None


def test_percentiles_are_values_that_were_measured() -> None:
    summary = Summary.of([float(value) for value in range(100, 0, -1)])
    assert (summary.count, summary.median, summary.p95, summary.p99, summary.maximum) == (100, 50.5, 95.0, 99.0, 100.0)
    assert Summary.of([3.0]).p99 == 3.0


def test_drift_between_pairs_cancels_in_the_ratio() -> None:
    raw = [1.0, 2.0, 4.0]
    assert Paired.of(raw, [value * 2 for value in raw]) == Paired(0.5, 0.0)


def test_the_spread_of_a_ratio_is_that_of_the_pairs() -> None:
    pairs = Paired.of([0.8, 0.9, 1.0, 1.1, 1.2], [1.0] * 5)
    assert (pairs.ratio, pairs.spread) == (1.0, pytest.approx(0.1)) and pairs.detail == {"ratio_spread": pairs.spread}


def test_a_workload_with_an_unknown_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.support.workload.WORKLOADS", tmp_path)
    (tmp_path / "odd.toml").write_text((WORKLOADS / "restore_320mib.toml").read_text().replace("[tiny]", "block_tokens = 16\n[tiny]"))
    with pytest.raises(Exception, match="block_tokens"):
        load_workload(Blocks, "odd", tiny=True)


def test_tiny_values_take_the_place_of_the_others() -> None:
    whole, tiny = load_workload(Blocks, "restore_320mib", tiny=False), load_workload(Blocks, "restore_320mib", tiny=True)
    assert whole.payload_bytes == 320 << 20
    assert tiny.block_bytes == whole.block_bytes and tiny.block_count < whole.block_count


def test_the_record_holds_question_machine_and_verdicts(tmp_path: Path) -> None:
    report = Report("sample", "Is it so?", argparse.Namespace(dir=tmp_path, tiny=True, results=tmp_path / "results"))
    report.add(Figure("rate", 2.0, "GB/s", expected=1.7, ceiling=2.0, ratio=1.0, target=Target(0.95, on_ratio=True)))
    report.finish()
    record = json.loads((tmp_path / "results" / "sample.json").read_text())
    assert record["question"] == "Is it so?" and record["figures"][0]["met"] is True
    assert record["machine"]["cores"] >= 1 and record["figures"][0]["expected"] == 1.7


@pytest.mark.parametrize("tiny", [False, True])
def test_a_tiny_run_meets_and_misses_nothing_and_says_so(tmp_path: Path, tiny: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("sample", "Is it so?", argparse.Namespace(dir=tmp_path, tiny=tiny, results=tmp_path / "results"))
    for ratio in (1.0, 0.1):
        report.add(Figure("rate", 2.0, "GB/s", ceiling=2.0, ratio=ratio, target=Target(0.95, on_ratio=True)))
    report.finish()
    said = " ".join(capsys.readouterr().out.split())
    assert ("Its figures mean nothing" in said) is tiny and ("│ met │" in said) is ("│ missed │" in said) is not tiny
