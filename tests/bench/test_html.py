"""The page holds every figure, fetches nothing, and is well-formed HTML; names are text and never markup."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.html import Drawer, main, page
from bench.support.report import Figure, Target
from bench.support.result import Result
from tests.bench.grid_rows import grid

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br"}
QUANTILES: dict[str, Any] = {"ms_count": 9, "ms_median": 2.0, "ms_p25": 1.5, "ms_p75": 2.5, "ms_p95": 3.0, "ms_p99": 4.0, "ms_max": 5.0}
FIGURES = [
    Figure("raw reads", 4.0, "GB/s", detail=QUANTILES | {"cpu_s_per_gb": 0.03}),
    Figure("restore", 3.0, "GB/s", 1.7, "bytes / disk", 4.0, 0.75, Target(0.95, on_ratio=True), QUANTILES | {"cpu_s_per_gb": 0.16, "path": "cufile_posix"}),
    Figure("restore <b>bold</b> & $cheap$", 3.9, "GB/s", ceiling=4.0, ratio=0.975, target=Target(0.95, on_ratio=True)),
    Figure("an empty call", 0.3, "ms", target=Target(1.0, at_least=False), detail={"median": 0.3, "p95": 0.5, "max": 0.9}),
    Figure("bytes a block", 93.0, "B"),
]


class Page(HTMLParser):
    """Text by element, tags that are open, attributes, and ids. Entities come decoded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data

    def ids(self) -> list[str]:
        return [value for name, value in self.attributes if name == "id"]


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "name": "restore",
        "question": "Is it <so>?",
        "tiny": False,
        "machine": {"cpu": "a processor", "cores": 2},
        "facts": {"fio": "not installed"},
        "notes": {"gds": ["no nvidia-fs", "<no> probe"]},
        "figures": FIGURES,
    }
    return Result(**(values | changes))


def drawn_nothing(_: object) -> list[Any]:
    return []


NOTHING = Drawer(drawn_nothing, drawn_nothing, drawn_nothing)


@pytest.fixture
def drawer() -> Drawer:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'offloadd[bench]'")
    from bench.support.plots import group_plots, overview_plots, plots

    return Drawer(plots, overview_plots, group_plots)


@pytest.fixture
def draw(drawer: Drawer) -> Callable[[Result], list[Any]]:
    return drawer.figures


def test_every_figure_has_a_row_with_measured_ceiling_ratio_and_verdict() -> None:
    shown = Page(page([result()], NOTHING))
    assert not shown.open and "b" not in shown.tags
    rows = {row[0]: row[1:] for row in shown.rows if len(row) == 7}
    assert len(rows) == 1 + len(FIGURES)
    told = next(name for name in rows if name.startswith("restoreexpected"))
    assert told == "restoreexpected: bytes / diskpath: cufile_posixms p25 1.5, median 2, p75 2.5, p95 3, p99 4, greatest 5"
    assert rows[told] == ["3 GB/s", "1.7", "4", "0.75", "≥ 0.95 of ceiling", "✗ missed"]
    assert rows["restore <b>bold</b> & $cheap$"] == ["3.9 GB/s", "", "4", "0.97", "≥ 0.95 of ceiling", "✓ met"]
    assert rows["an empty callmedian 0.3, p95 0.5, greatest 0.9"] == ["0.3 ms", "", "", "", "≤ 1", "✓ met"]
    assert rows["bytes a block"] == ["93 B", "", "", "", "", ""]
    assert "5 figures; 2 of 3 targets met." in shown.texts


def test_facts_and_notes_say_why_rows_are_missing() -> None:
    shown = Page(page([result()], NOTHING))
    assert ["fio", "not installed"] in shown.rows and "no nvidia-fs\n<no> probe" in shown.texts
    quiet = Page(page([result(facts={}, notes={})], NOTHING))
    assert not any("reasons where rows are missing" in text for text in quiet.texts)


def test_a_fact_of_the_machine_is_told_once_and_by_benchmark_where_it_differs() -> None:
    shown = Page(page([result(), result(name="lookup", machine={"cpu": "a processor", "cores": 4})], NOTHING))
    assert ["cpu", "a processor"] in shown.rows and ["cores", "2 (restore)4 (lookup)"] in shown.rows


def test_a_tiny_run_is_called_one() -> None:
    tiny = page([result(tiny=True)], NOTHING)
    assert any("tiny run" in text for text in Page(tiny).texts)
    # Nor does it meet or miss anything.
    assert "targets met" not in tiny and "class=met" not in tiny and "class=missed" not in tiny
    assert "class=met" in page([result()], NOTHING)
    assert not any("tiny run" in text for text in Page(page([result()], NOTHING)).texts)


def test_a_page_with_plots_is_well_formed_and_fetches_nothing(drawer: Drawer) -> None:
    text = page([result(), result(name="again"), result(figures=[], rows=grid(sizes=(1024, 4096), models=2))], drawer)
    shown = Page(text)
    assert not shown.open and shown.tags["svg"] == 6 + 1 + 7 + 4
    assert not {"script", "link", "img", "iframe", "object", "image"} & shown.tags.keys()
    # Namespaces would be harmless; without them nothing that looks like an address is left to explain.
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=", text)
    references = [value for name, value in shown.attributes if name in ("href", "xlink:href")] + re.findall(r"url\(([^)]*)\)", text)
    assert references and all(reference.startswith("#") for reference in references)
    ids = Counter(shown.ids())
    assert max(ids.values()) == 1, ids.most_common(3)
    assert {reference[1:] for reference in references} <= ids.keys()


def test_plots_show_every_ratio_every_series_of_times_and_throughput_against_cpu(draw: Callable[[Result], list[Any]]) -> None:
    found = {plot.title: plot for plot in draw(result())}
    assert list(found) == ["Ratio to ceiling", "Latencies", "Throughput against CPU"]
    ratios, latencies = Page(found["Ratio to ceiling"].svg).texts, Page(found["Latencies"].svg).texts
    assert {"restore", "restore <b>bold</b> & $cheap$", "0.75", "0.97"} <= {text.strip() for text in ratios}
    assert {"raw reads", "restore", "an empty call", "median", "p95", "p99", "greatest"} <= {text.strip() for text in latencies}
    assert found["Throughput against CPU"].key == ["raw reads: 4 GB/s, 0.03 s/GB", "restore: 3 GB/s, 0.16 s/GB"]
    assert draw(result(figures=FIGURES[-1:])) == []


def test_a_long_plot_goes_on_in_a_next_one(draw: Callable[[Result], list[Any]]) -> None:
    figures = [Figure(f"number {number}", 1.0, "GB/s", ceiling=1.0, ratio=1.0) for number in range(49)]
    found = draw(result(figures=figures))
    assert [plot.title for plot in found] == [f"Ratio to ceiling ({part} of 3)" for part in (1, 2, 3)]
    names = [text.strip() for plot in found for text in Page(plot.svg).texts if text.strip().startswith("number")]
    assert sorted(names) == sorted(figure.name for figure in figures)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_times_that_a_logarithm_does_not_take_are_left_out(draw: Callable[[Result], list[Any]], value: float) -> None:
    assert draw(result(figures=[Figure("it", 1.0, "ms", detail={"median": value, "max": 2.0})])) == []


def write(path: Path) -> Path:
    record = {"name": "restore", "question": "Is it so?", "tiny": False, "machine": {}, "facts": {}, "notes": {}}
    path.write_text(json.dumps(record | {"figures": [asdict(figure) for figure in FIGURES]}))
    return path


def test_the_command_writes_the_page(tmp_path: Path, draw: object) -> None:
    assert main([str(write(tmp_path / "one.json")), "-o", str(tmp_path / "report.html")]) == 0
    assert not Page((tmp_path / "report.html").read_text(encoding="utf-8")).open


def test_what_cannot_be_read_or_written_ends_in_status_two(tmp_path: Path, draw: object, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main([str(tmp_path / "none.json"), "-o", str(out)]) == 2 and "none.json" in capsys.readouterr().err
    assert not out.exists()
    assert main([str(write(tmp_path / "one.json")), "-o", str(tmp_path / "nowhere" / "report.html")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from bench.html import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(write(tmp_path / "one.json")), "-o", str(tmp_path / "report.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "offloadd[bench]" in done.stderr and "Traceback" not in done.stderr
