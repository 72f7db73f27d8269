"""The record that a benchmark left, read back."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.support.report import Figure
from bench.support.row_checks import rows_of
from bench.support.rows import Row

#: Measured numbers that a name carries in brackets change from run to run: "find 512 (median 0.093, p99 0.121)".
_MEASURED_IN_NAME = re.compile(r"\s*\([^()]*\d\.\d[^()]*\)")
#: "median", "ms_p95", "cpu_ms_p99_9"; the count and the shares beside them are no quantiles.
_QUANTILE = re.compile(r"(?P<prefix>(?:\w+_)?)(?:(?P<name>min|median|max)|p(?P<percent>\d{1,2}(?:[._]\d+)?))")
_PERCENTS = {"min": 0.0, "median": 50.0, "max": 100.0}


class ResultError(Exception):
    """A file that is no record of a benchmark; says which file and why."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One measured series of a figure: values by percent (0 the least, 100 the greatest), and the median absolute deviation, where they were recorded."""

    prefix: str
    quantiles: dict[float, float]
    mad: float | None = None

    @property
    def relative(self) -> float | None:
        """Half the interquartile range, or the median absolute deviation, by the median; None where neither was recorded.

        Not divided by the root of the count: that would be the error of the median of one run, and machines drift more between runs than that.
        """
        median = self.quantiles.get(50.0)
        if not median:
            return None
        low, high = self.quantiles.get(25.0), self.quantiles.get(75.0)
        if low is not None and high is not None:
            return abs(high - low) / 2 / abs(median)
        return None if self.mad is None else self.mad / abs(median)


class Result(msgspec.Struct, frozen=True):
    """What `Report.finish` wrote. `notes` holds lines of text, `facts` what the run found out about itself, `rows` the cases of a grid, where there was one."""

    name: str
    question: str
    tiny: bool
    machine: dict[str, Any]
    facts: dict[str, Any]
    notes: dict[str, list[str]]
    figures: list[Figure]
    rows: list[Row] = []


class _Stored(Result, frozen=True):
    """As stored: a detail is whatever the benchmark told, so it is no matter for the schema; of rows each is converted by itself, to be named."""

    figures: list[dict[str, Any]]  # type: ignore[assignment]
    rows: list[dict[str, Any]] = []  # type: ignore[assignment]


def read_result(path: Path) -> Result:
    """Read one file; raises `ResultError`."""
    try:
        stored = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _Stored)
        figures = [replace(msgspec.convert(one, Figure), detail=one_detail) for one, one_detail in map(_apart, stored.figures)]
        rows = rows_of(stored.rows)
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is no result of a benchmark: {error}") from error
    for figure in figures:
        _check(path, figure)
    return Result(stored.name, stored.question, stored.tiny, stored.machine, stored.facts, stored.notes, figures, rows)


def _apart(figure: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    detail = figure.get("detail", {})
    if not isinstance(detail, dict):
        raise ValueError(f"the detail of {figure.get('name')!r} is {detail!r}, not an object")
    return {name: value for name, value in figure.items() if name != "detail"}, detail


def _check(path: Path, figure: Figure) -> None:
    """JSON as Python writes it may hold NaN and Infinity, which compare as neither better nor worse than anything."""
    for name in ("value", "expected", "ceiling", "ratio"):
        value = getattr(figure, name)
        if value is not None and not math.isfinite(value):
            raise ResultError(f"{path} is no result of a benchmark: {name} of {figure.name!r} is {value}, not a finite number")
    if figure.target is not None and figure.target.on_ratio and figure.ratio is None:
        raise ResultError(f"{path} is no result of a benchmark: the target of {figure.name!r} is on the ratio, and there is no ratio")


def stable_name(figure: Figure) -> str:
    """The name without what was measured: the same in every run."""
    return _MEASURED_IN_NAME.sub("", figure.name)


def spreads(figure: Figure) -> list[Spread]:
    """The series whose quantiles the detail holds, in its order; one without a median is left out."""
    found: dict[str, dict[float, float]] = {}
    for key, value in figure.detail.items():
        match = _QUANTILE.fullmatch(key)
        if match is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        percent = _PERCENTS[match["name"]] if match["name"] else float(match["percent"].replace("_", "."))
        found.setdefault(match["prefix"], {})[percent] = float(value)
    return [Spread(prefix, dict(sorted(values.items())), _number_at(figure, f"{prefix}mad")) for prefix, values in found.items() if 50.0 in values]


def _number_at(figure: Figure, key: str) -> float | None:
    value = figure.detail.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def texts(figure: Figure) -> dict[str, str]:
    """What the detail says in words, such as the path that was proven."""
    return {name: str(value) for name, value in figure.detail.items() if isinstance(value, str | bool)}
