"""One measured figure: what was expected of it, what bounds it, what is promised."""

from dataclasses import dataclass, field

Detail = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Target:
    """What is promised of a figure: of its value, or of its ratio to the ceiling."""

    limit: float
    at_least: bool = True
    on_ratio: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {shown(self.limit)}{' of ceiling' if self.on_ratio else ''}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure in `unit`. `expected` was worked out before (`sketch` says how); `ceiling` was measured in the same run, interleaved.

    `ratio` is that to the ceiling, 1 being as good as it.
    """

    name: str
    value: float
    unit: str
    expected: float | None = None
    sketch: str = ""
    ceiling: float | None = None
    ratio: float | None = None
    target: Target | None = None
    detail: Detail = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        value = self.ratio if self.target.on_ratio else self.value
        assert value is not None, self.name
        return value >= self.target.limit if self.target.at_least else value <= self.target.limit


def shown(value: float) -> str:
    """Three significant digits, thousands whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def fact_text(value: object) -> str:
    """A fact of a run, for people."""
    if value is None:
        return "untold"
    return shown(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
