"""What the parts of `bench.gpu_figures` report to: figures with the proven way, and reasons where there are none."""

import msgspec

from bench.support.report import Detail, Figure, Report, Target
from bench.support.rows import Row

#: What the stand-in of tests/standin calls itself; no GPU of NVIDIA's does.
STANDIN = "stand-in"
CAUTION = "The CUDA driver is a stand-in over host memory: these figures show that the benchmark works and say nothing about any GPU. Do not quote them."


def is_standin(device_name: str) -> bool:
    """Whether the driver's name of the GPU is that of a stand-in."""
    return STANDIN in device_name.lower()


class Figures:
    """Figures of one GPU. Over a stand-in each is marked in its name and has no target: nothing there can be met or missed."""

    def __init__(self, report: Report, *, standin: bool) -> None:
        self._report = report
        self._standin = standin
        if standin:
            report.facts["caution"] = CAUTION
            report.say(CAUTION)

    @property
    def tiny(self) -> bool:
        """Whether the run only shows that the benchmark works."""
        return self._report.tiny

    def say(self, text: str) -> None:
        """Tell what goes on."""
        self._report.say(text)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        way: str,
        ceiling: float | None = None,
        ratio: float | None = None,
        target: Target | None = None,
        detail: Detail | None = None,
    ) -> None:
        """One more. `way`: which way the bytes went, as far as it was proven, and by what."""
        self._report.add(
            Figure(
                f"{STANDIN}, no speed: {name}" if self._standin else name,
                value,
                unit,
                ceiling=ceiling,
                ratio=ratio,
                target=None if self._standin else target,
                detail={"way": way, **(detail or {}), **({"caution": CAUTION} if self._standin else {})},
            )
        )

    def add_row(self, row: Row) -> None:
        """One more row of a grid, by its case."""
        if self._standin:
            case = msgspec.structs.replace(row.case, model=f"{STANDIN}, no speed: {row.case.model}")
            row = msgspec.structs.replace(row, case=case)
        self._report.add_row(row)

    def skip(self, what: str, why: str) -> None:
        """There is no figure of this, and why."""
        reason = " ".join(why.split())
        self._report.facts[f"skipped: {what}"] = reason
        self._report.say(f"skipped: {what}: {reason}")
