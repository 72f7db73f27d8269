"""docs/metrics.md says what the registry has: each metric with its type and labels, and no other."""

import re
from pathlib import Path

import pytest

from offloadd.metrics.registry import BUCKETS_S, OUTCOMES, PATHS, SPAN_LOSSES, STAGES, WAYS, Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
#: (name, type, labels) by row.
ROWS = re.findall(r"^\| `(offloadd_\w+)` \| (\w+)[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)


@pytest.fixture
def registered() -> dict[str, tuple[str, list[str]]]:
    metrics = Metrics()
    found = {}
    for collector in list(metrics.registry._collector_to_names):
        (family,) = collector.describe()  # type: ignore[attr-defined]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, list(collector._labelnames))  # type: ignore[attr-defined]
    return found


def test_every_metric_is_on_the_page_once_with_its_type_and_its_labels(registered: dict[str, tuple[str, list[str]]]) -> None:
    on_page = {name: (kind, [one for one in re.sub(r"\([^)]*\)", "", labels).replace(" ", "").split(",") if one]) for name, kind, labels in ROWS}
    assert len(ROWS) == len(on_page), "a metric stands there twice"
    assert on_page == registered


def test_a_metric_that_is_named_in_the_text_is_one(registered: dict[str, tuple[str, list[str]]]) -> None:
    assert set(re.findall(r"offloadd_[a-z_]+[a-z]", PAGE)) <= set(registered)


def test_label_values_of_closed_sets_are_on_the_page() -> None:
    for value in (*OUTCOMES, *STAGES, *WAYS, *PATHS, *SPAN_LOSSES):
        assert f"`{value}`" in PAGE, value
    assert f"from {BUCKETS_S[0] * 1e6:.0f} µs to {BUCKETS_S[-1]:.0f} s" in PAGE
