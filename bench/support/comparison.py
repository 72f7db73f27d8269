"""Verdicts on two results of one benchmark, figure by figure.

A figure with a ratio to its ceiling in both results is judged by the ratio: the ceiling was measured in the same run, so what the machine drifts cancels.
A figure that serves others as their ceiling says how fast the machine was, not how good we are, and is not judged. All others are judged by their value.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bench.support.report import Figure
from bench.support.result import Result, shown, spreads, stable_name, texts

#: Facts that differ between any two runs and say nothing about whether they can be compared; the commit is what one compares.
_ALWAYS_DIFFERENT = frozenset({"commit", "date", "load_average"})
_DOWN = frozenset({"ns", "µs", "us", "ms", "s", "min", "cores", "B", "KiB", "MiB", "GiB"})
#: GB alone is what a CPU second moved; memory is told in binary units.
_UP = frozenset({"GB", "×"})


class Verdict(StrEnum):
    """What became of a figure."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    CEILING = "a ceiling, not judged"
    NOT_COMPARABLE = "not comparable"


class Basis(StrEnum):
    """What was compared."""

    RATIO = "ratio to ceiling"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both results. `old` and `new` are what was compared; `noise` is the relative band within which a change means nothing."""

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
    figures: list[Compared]
    only_old: list[str]
    only_new: list[str]

    @property
    def worse(self) -> bool:
        """Whether any figure is worse beyond its noise."""
        return any(figure.verdict is Verdict.WORSE for figure in self.figures)


def compare(old: Result, new: Result, *, noise: float) -> Comparison:
    """Compare figures of the same name. A figure's band is the widest of `noise` (0.1: a tenth) and what either result tells of its spread."""
    ours, theirs = dict(_named(old)), dict(_named(new))
    ceilings = _ceilings(old) | _ceilings(new)
    return Comparison(
        list(_warnings(old, new)),
        [_compared(name, ours[name], theirs[name], noise, is_ceiling=name in ceilings) for name in ours if name in theirs],
        [name for name in ours if name not in theirs],
        [name for name in theirs if name not in ours],
    )


def _named(result: Result) -> Iterator[tuple[str, Figure]]:
    """Names that came more than once are numbered in their order."""
    seen: Counter[str] = Counter()
    for figure in result.figures:
        name = stable_name(figure)
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), figure


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
    band = max(noise, _spread(old), _spread(new))
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
    return Compared(name, new.unit, basis, before, after, band, found, remarks)


def _spread(figure: Figure) -> float:
    """Of the first series: benchmarks write the one that the value comes from before others."""
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
                yield f"{title}: {name} was {_told(before.get(name))}, is {_told(after.get(name))}"


def _told(value: object) -> str:
    if value is None:
        return "untold"
    return shown(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
