"""Lines that are never wider than they may be, and lists that share the height."""

import pytest
from rich.text import Text

from offloadd.cli.grid import Column, crop, fair_shares, grid


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([3, 2, 1], 10, [3, 2, 1]),
        ([9, 1, 9], 9, [4, 1, 4]),
        ([9, 9, 9], 10, [4, 3, 3]),
        ([5, 5], 0, [0, 0]),
        ([0, 7], 3, [0, 3]),
        ([], 5, []),
    ],
)
def test_lists_share_lines_evenly_and_leave_none_unused(wanted: list[int], total: int, shares: list[int]) -> None:
    assert fair_shares(wanted, total) == shares


def test_a_text_that_is_too_long_keeps_the_end_that_tells_most() -> None:
    path = Text("/var/lib/offloadd/nvme0n1-volume0")
    assert crop(path, 40).plain == path.plain
    assert crop(path, 10).plain == "/var/lib/…"
    assert crop(path, 10, "end").plain == "…1-volume0"
    assert crop(path, 1).plain == "…" and crop(path, 0).plain == ""
    # Wide characters take two cells.
    assert crop(Text("引擎引擎"), 5).cell_len <= 5 and crop(Text("引擎引擎"), 5, "end").cell_len <= 5


@pytest.mark.parametrize("width", [20, 40, 80])
def test_columns_stand_below_each_other_within_the_width(width: int) -> None:
    columns = [Column("name", right=False, keep="end"), Column("count", 7), Column("state", 6, right=False)]
    lines = grid(columns, [["a" * 100, "1,234", "serving"], ["b", "12", Text("off", style="red")]], width)
    assert all(line.cell_len <= width for line in lines)
    if width >= 40:
        assert len({line.cell_len for line in lines}) == 1
        assert lines[1].plain.index("1,234") + 5 == lines[2].plain.index("12") + 2
        assert "servi…" in lines[1].plain
