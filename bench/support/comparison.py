"""Verdicts on two results of one benchmark, figure by figure and row by row.

A figure or row with a ratio to its ceiling in both results is judged by the ratio: the ceiling was measured in the same run, so what the machine
drifts cancels. A figure that serves others as their ceiling says how fast the machine was, not how good we are, and is not judged. All others are judged
by their value; a row's is its median latency.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from bench.support.figure import fact_text, shown
from bench.support.report import Detail, Figure
from bench.support.result import Result, spreads, stable_name, texts
from bench.support.rows import Row

#: Facts that differ between any two runs and say nothing about whether they can be compared; the commit is what one compares.
_ALWAYS_DIFFERENT = frozenset({"commit", "date", "load_average"})
_DOWN = frozenset({"ns", "µs", "us", "ms", "s", "min", "cores", "B", "KiB", "MiB", "GiB"})
#: GB alone is what a CPU second moved; memory is told in binary units.
_UP = frozenset({"GB", "×"})
#: A change of the share that went the way asked for, below which it is an odd request and no change of the way.
_SHARE_MEANS_NOTHING = 0.001


class Verdict(StrEnum):
    """What became of a figure."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    CEILING = "a ceiling, not judged"
    ESTIMATE = "an estimate, not judged"
    NOT_COMPARABLE = "not comparable"


class Basis(StrEnum):
    """What was compared."""

    RATIO = "ratio to ceiling"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure, or row, of both results. `old` and `new` are what was compared; `noise` is the relative band within which a change means nothing."""

    name: str
    unit: str
    basis: Basis
    old: float
    new: float
    noise: float
    verdict: Verdict
    #: What else changed: a target that was met and is missed, another path, another unit.
    remarks: list[str]

    @property
    def ratio(self) -> float | None:
        """New by old; None where old is 0."""
        return self.new / self.old if self.old else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that differs between two results."""

    warnings: list[str]
    #: Rows after the figures, each under the name of its case.
    figures: list[Compared]
    only_old: list[str]
    only_new: list[str]
    #: What the old run could measure and the new one could not, each with the reason where the run tells one.
    lost: list[str] = field(default_factory=list)
    #: Rows that were not run before, or in neither for the same reason.
    skips: list[str] = field(default_factory=list)

    @property
    def worse(self) -> bool:
        """Whether any figure or row is worse beyond its noise, went a worse way, or is not there any more though it was asked for."""
        return bool(self.lost) or any(figure.verdict is Verdict.WORSE for figure in self.figures)


def compare(old: Result, new: Result, *, noise: float) -> Comparison:
    """Compare figures of the same name. A figure's band is the widest of `noise` (0.1: a tenth) and what either result tells of its spread."""
    ours, theirs = dict(_named(old)), dict(_named(new))
    our_rows, their_rows = named_rows(old.rows), named_rows(new.rows)
    ceilings = _ceilings(old) | _ceilings(new)
    figures = [_compared(name, ours[name], theirs[name], noise, is_ceiling=name in ceilings) for name in ours if name in theirs]
    pairs = {name: (row, their_rows[name]) for name, row in our_rows.items() if name in their_rows}
    gone = [name for name in ours if name not in theirs]
    # Figures of a run that was asked for less are no loss; they are one where the run says that it could not measure something.
    lost_figures = [f"{name}: was measured, is not" for name in gone] if _tells_loss(old, new) else []
    lost_rows = [f"{name}: was run, is not: {row.skipped}" for name, (before, row) in pairs.items() if row.skipped and not before.skipped]
    return Comparison(
        list(_warnings(old, new)),
        figures + [_compared_rows(name, *pair, noise) for name, pair in pairs.items() if not any(row.skipped for row in pair)],
        ([] if lost_figures else gone) + [name for name in our_rows if name not in their_rows],
        [name for one, other in ((theirs, ours), (their_rows, our_rows)) for name in one if name not in other],
        lost_figures + lost_rows,
        [told for name, pair in pairs.items() for told in _skipped(name, *pair)],
    )


def _named(result: Result) -> Iterator[tuple[str, Figure]]:
    """Names that came more than once are numbered in their order."""
    seen: Counter[str] = Counter()
    for figure in result.figures:
        name = stable_name(figure)
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), figure


def _tells_loss(old: Result, new: Result) -> bool:
    """Whether the new run says of something that it was skipped or failed, and the old one did not."""
    return any(name.startswith(("skipped: ", "failed: ")) and name not in old.facts for name in new.facts)


def named_rows(rows: list[Row]) -> dict[str, Row]:
    """By the name of the case; one that came more than once is numbered in its order."""
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        name = row.case.name
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} #{seen[name]}"] = row
    return found


def _skipped(name: str, old: Row, new: Row) -> Iterator[str]:
    if old.skipped and not new.skipped:
        yield f"{name}: is run, was not: {old.skipped}"
    elif old.skipped and old.skipped != new.skipped:
        yield f"{name}: was not run and is not, for another reason: {old.skipped} → {new.skipped}"


def _compared_rows(name: str, old: Row, new: Row, noise: float) -> Compared:
    """As figures are, but for what only rows know: estimates, the ceiling's name, and the way that bytes are proven to have gone."""
    before, after = replace(old.figure, detail=_numbers(old)), replace(new.figure, detail=_numbers(new))
    remarks = []
    if old.ratio is not None and new.ratio is not None and old.ceiling != new.ceiling:
        # Ratios to different things don't compare.
        before, after = replace(before, ratio=None), replace(after, ratio=None)
        remarks.append(f"ceiling {old.ceiling} → {new.ceiling}, so the median latency is compared")
    found = _compared(name, before, after, noise, is_ceiling=False)
    remarks += found.remarks
    if old.estimated or new.estimated:
        return replace(found, verdict=Verdict.ESTIMATE, remarks=remarks)
    if old.proven.keys() != new.proven.keys() or abs(old.asked_share - new.asked_share) > _SHARE_MEANS_NOTHING:
        remarks.append(f"way {_ways(old)} → {_ways(new)}")
    if new.asked_share < old.asked_share - _SHARE_MEANS_NOTHING:
        # However fast: what was asked for is not what was measured.
        return replace(found, verdict=Verdict.WORSE, remarks=[*remarks, f"less went by {new.case.path}, which was asked for"])
    return replace(found, remarks=remarks)


def _numbers(row: Row) -> Detail:
    """Without the way, which is compared by its shares and not as a text."""
    return {name: value for name, value in row.figure.detail.items() if not isinstance(value, str)}


def _ways(row: Row) -> str:
    return " + ".join(f"{way} {share:.1%}" for way, share in sorted(row.proven.items())) or "unproven"


def _ceilings(result: Result) -> set[str]:
    """Names of figures, themselves without a ceiling, whose value is the ceiling of another one of that unit."""
    used = [(figure.ceiling, figure.unit) for figure in result.figures if figure.ceiling is not None]
    return {
        name
        for name, figure in _named(result)
        if figure.ceiling is None and any(figure.unit == unit and math.isclose(figure.value, ceiling) for ceiling, unit in used)
    }


def up_is_better(figure: Figure, basis: Basis) -> bool | None:
    """Which way is better: by the target where it is on what is compared, else by the unit; None where neither says."""
    if figure.target is not None and figure.target.on_ratio == (basis is Basis.RATIO):
        return figure.target.at_least
    if basis is Basis.RATIO:
        return True  # 1 is as good as the ceiling, whatever the unit
    unit = figure.unit.split()[0] if figure.unit.strip() else ""
    if "/" in unit:
        # Something a second is a rate; a time, or memory, by something is a cost.
        return True if unit.endswith("/s") else False if unit.partition("/")[0] in _DOWN else None
    return True if unit in _UP else False if unit in _DOWN else None


def verdict(old: float, new: float, *, noise: float, up: bool) -> Verdict:
    """Beyond noise when the difference exceeds `noise` times the smaller one: half as fast and twice as fast weigh the same, and 0 needs no quotient."""
    if abs(new - old) <= noise * min(abs(old), abs(new)):
        return Verdict.WITHIN_NOISE
    return Verdict.BETTER if (new > old) == up else Verdict.WORSE


def _compared(name: str, old: Figure, new: Figure, noise: float, *, is_ceiling: bool) -> Compared:
    basis = Basis.VALUE
    before, after = old.value, new.value
    if old.ratio is not None and new.ratio is not None:
        basis, before, after = Basis.RATIO, old.ratio, new.ratio
    band = max(noise, _spread(old, basis), _spread(new, basis))
    up = up_is_better(new, basis)
    remarks = list(_remarks(old, new))
    if basis is Basis.VALUE and old.unit != new.unit:
        found = Verdict.NOT_COMPARABLE
    elif is_ceiling:
        found = Verdict.CEILING
    elif up is None:
        found = Verdict.NOT_COMPARABLE
        remarks.append(f"no target, and {new.unit!r} does not say which way is better")
    else:
        found = verdict(before, after, noise=band, up=up)
    if basis is Basis.RATIO and found is Verdict.WITHIN_NOISE and old.unit == new.unit:
        moved = verdict(old.value, new.value, noise=max(noise, _spread(old, Basis.VALUE), _spread(new, Basis.VALUE)), up=True)
        if moved is not Verdict.WITHIN_NOISE:
            # The machine, or what our own code and the ceiling have in common: whoever reads it must know.
            remarks.append(f"{shown(old.value)} → {shown(new.value)} {new.unit}, and the ceiling with it")
    return Compared(name, new.unit, basis, before, after, band, found, remarks)


def _spread(figure: Figure, basis: Basis) -> float:
    """Of the ratio, where that is compared and its spread was told; else of the first series, which is the one that the value comes from."""
    told = figure.detail.get("ratio_spread") if basis is Basis.RATIO else None
    if isinstance(told, int | float) and math.isfinite(told):
        return float(told)
    return next((found.relative for found in spreads(figure) if found.relative is not None), 0.0)


def _remarks(old: Figure, new: Figure) -> Iterator[str]:
    if old.unit != new.unit:
        yield f"unit {old.unit} → {new.unit}"
    if old.met != new.met:
        words = {None: "none", True: "met", False: "missed"}
        yield f"target {words[old.met]} → {words[new.met]}"
    before, after = texts(old), texts(new)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} {before.get(name, 'untold')} → {after.get(name, 'untold')}"


def _warnings(old: Result, new: Result) -> Iterator[str]:
    for result, which in ((old, "old"), (new, "new")):
        if result.tiny:
            yield f"the {which} result is of a tiny run, whose figures mean nothing"
    for title, before, after in (("machine", old.machine, new.machine), ("fact", old.facts, new.facts)):
        for name in dict.fromkeys((*before, *after)):
            if name not in _ALWAYS_DIFFERENT and before.get(name) != after.get(name):
                yield f"{title}: {name} was {fact_text(before.get(name))}, is {fact_text(after.get(name))}"
