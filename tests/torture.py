"""`make torture`: tests of promises with the counts and limits of a night instead of those of `make test`, and a record of what ran.

A test takes part by its mark and these fixtures; in `make test` it is like any other:

    @pytest.mark.torture("P6")
    def test_a_promise(rounds: Rounds, within: Within, record_property) -> None:
        for number in range(rounds(500, 10_000, "rounds")):     # 500 in `make test`, 10,000 in `make torture`
            ...
        assert answered_s <= within(0.05)                       # ten times as long in `make test`, where no test fails because a machine was slow
        record_property("answered", "12 ms")                    # a measured figure, for the record
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.support.machine import machine_record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
#: Of one test: an end for one that hangs, and longer than a million requests take.
TIMEOUT_S = 8 * 3600

#: `rounds(count, torture_count, what)`: how often to do it in this run.
Rounds = Callable[[int, int, str], int]
#: `within(figure)`: the limit of this run.
Within = Callable[[float], float]


def add_options(parser: pytest.Parser) -> None:
    """`--torture` and what narrows it."""
    group = parser.getgroup("torture")
    group.addoption("--torture", type=float, nargs="?", const=1.0, metavar="SHARE", help="Run only tests of promises, with this share of their night's counts.")
    group.addoption("--promises", default="", metavar="P6,P11", help="With --torture: only tests of these promises.")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Rounds:
    """See above. `what` are they: "requests", "kills"; it stands in the record."""
    share = request.config.getoption("--torture")

    def choose(count: int, torture_count: int, what: str) -> int:
        chosen = count if share is None else max(count, round(share * torture_count))
        request.node.user_properties.append((what, f"{chosen:,}"))
        return chosen

    return choose


@pytest.fixture
def within(request: pytest.FixtureRequest) -> Within:
    """See above."""
    factor = 10 if request.config.getoption("--torture") is None else 1
    return lambda figure: factor * figure


class Torture:
    """The plugin of a run with `--torture`: chooses the tests, and writes what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self._share = config.getoption("--torture")
        self._promises = [name for name in re.split(r"[\s,]+", config.getoption("--promises")) if name]
        self._rows: list[dict[str, Any]] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Only marked tests, of the promises asked for."""
        known = {name for item in items for mark in item.iter_markers("torture") for name in mark.args}
        if unknown := set(self._promises) - known:
            raise pytest.UsageError(f"no test is marked with {sorted(unknown)}; promises with tests are {sorted(known)}")
        wanted = set(self._promises) or known
        chosen = [item for item in items if any(wanted & set(mark.args) for mark in item.iter_markers("torture"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        for item in items:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Remember each test's outcome with its counts and figures."""
        report = yield
        if report.when == "call" or not report.passed:
            self._rows.append(
                {
                    "promises": sorted({name for mark in item.iter_markers("torture") for name in mark.args}),
                    "test": item.nodeid,
                    "outcome": report.outcome if report.when == "call" or report.skipped else f"{report.when} failed",
                    "seconds": round(report.duration, 1),
                    "figures": dict(item.user_properties),
                    "why": report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "",
                }
            )
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the record and print it, also of a run that was broken off."""
        if not self._rows:
            return
        machine = machine_record(ROOT)
        name = "-".join(["torture", *self._promises, re.sub(r"\D", "", str(machine["date"]))[:14]])
        table = _table(self._rows, machine, self._share)
        RESULTS.mkdir(parents=True, exist_ok=True)
        record = {"share": self._share, "machine": machine, "tests": self._rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
        (RESULTS / f"{name}.md").write_text(table)
        terminalreporter.write_sep("=", "torture")
        terminalreporter.write_line(table)
        terminalreporter.write_line(f"written to {RESULTS / name}.json and .md")


def _table(rows: list[dict[str, Any]], machine: dict[str, Any], share: float) -> str:
    lines = [
        f"{machine['date'][:10]}, {machine['cores']} cores, {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {machine['commit']}" + (f"; {share:g} of the counts of a night" if share != 1 else ""),
        "",
        "| promise | test | counts and figures | outcome | time |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        figures = ", ".join(f"{what} {value}" for what, value in row["figures"].items())
        outcome = row["outcome"] + (f": {row['why']}" if row["why"] else "")
        lines.append(f"| {' '.join(row['promises'])} | `{row['test'].partition('::')[2]}` | {figures} | {outcome} | {row['seconds']:,.0f} s |")
    return "\n".join(lines) + "\n"
