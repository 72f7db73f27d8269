"""The page shows every row of a grid: measured ones by group with what is proven of them, the others with the reason."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.html import Drawer, main, page
from bench.support.result import Result
from bench.support.row_groups import groups
from bench.support.row_page import way_told
from bench.support.rows import Operation, Row
from tests.bench.grid_rows import NO_GPU, case, grid, measured, recomputed
from tests.bench.test_html import NOTHING, Page


def result(rows: list[Row]) -> Result:
    return Result("restore", "How long?", False, {}, {}, {}, [], rows)


def table_rows(text: str) -> list[list[str]]:
    return [row for row in Page(text).rows if len(row) == 13 and row[0] != "asked"]


def texts_of(svg: str) -> list[str]:
    return [text.strip() for text in Page(svg).texts if text.strip()]


@pytest.fixture
def drawer() -> Drawer:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'offloadd[bench]'")
    from bench.support.plots import group_plots, overview_plots, plots

    return Drawer(plots, overview_plots, group_plots)


def test_every_row_that_was_run_is_in_a_table_once() -> None:
    rows = grid(models=2)
    assert len(table_rows(page([result(rows)], NOTHING))) == len(rows)
    host = grid(gpu=False, models=2)
    assert len(table_rows(page([result(host)], NOTHING))) == sum(not row.skipped for row in host) < len(host)


def test_a_row_tells_percentiles_rate_ceiling_ratio_cost_and_way() -> None:
    seconds = [number / 1000 for number in range(1, 201)]
    row = measured(
        case(),
        seconds=seconds,
        gb_per_s=12.0,
        ceiling_gb_per_s=24.0,
        ratio=0.51,
        cpu_s_per_gb=0.02,
        memory_bytes_per_byte=0.5,
        stages={"io_s": 0.004, "total_s": 0.1},
    )
    text = page([result([row, recomputed(case(path="recompute"), 9000)])], NOTHING)
    told, estimate = table_rows(text)
    assert told == [
        "restore by gds200 requestsms: io 4", "1,02464 × 2 MiB = 128 MiB", "1", "gds_nvfs", "100", "190", "198", "12", "24bare KvikIO reads", "0.51",
        "0.02", "0.50", "1.13 ×",
    ]  # fmt: skip
    assert estimate[3:] == ["estimated", "114", "", "", "", "", "", "", "", ""]


def test_a_restore_of_fewer_ranks_than_are_recomputed_says_so_and_what_the_estimate_rests_on() -> None:
    estimate = recomputed(case(path="recompute", tensor_parallel=8), 9000)
    told = {gpus: page([result([measured(case(tensor_parallel=8, gpu_count=gpus)), estimate])], NOTHING) for gpus in (1, 8)}
    assert table_rows(told[1])[0][-1].endswith(" ×1 of 8 ranks restored") and table_rows(told[8])[0][-1].endswith(" ×")
    assert "Recompute is estimated; the run does not say from what." in told[1]
    facts = msgspec.structs.replace(result([estimate]), facts={"recompute": "estimated: an [H100] & 50%"})
    assert "Recompute is estimated: an [H100] &amp; 50%." in page([facts], NOTHING)


def test_a_p99_of_few_requests_is_marked_as_the_slowest() -> None:
    row = measured(case(), seconds=[0.1, 0.2], request_count=99)
    text = page([result([row])], NOTHING)
    assert table_rows(text)[0][6] == "200*" and "fewer than 100 requests is the slowest" in text
    assert "is the slowest" not in page([result([measured(case()), Row(case(path="recompute"), request_count=1, seconds=[1.0], estimated=True)])], NOTHING)


@pytest.mark.parametrize(
    ("path", "proven", "told"),
    [
        ("gds", {"gds_nvfs": 1.0}, "gds_nvfs"),
        ("gds", {"gds_p2p": 0.25, "gds_nvfs": 0.75}, "gds_nvfs 75%, gds_p2p 25%"),
        ("gds", {"cufile_posix": 1.0}, "✗ asked gds, went cufile_posix"),
        ("gds", {"gds_nvfs": 0.9999, "bounce": 0.0001}, "✗ asked gds, went gds_nvfs 99.99%, bounce 0.01%"),
        ("gds", {"gds_nvfs": 0.999999, "bounce": 0.000001}, "✗ asked gds, went gds_nvfs > 99.99%, bounce < 0.01%"),
        ("host", {}, "✗ asked host, nothing is proven"),
    ],
)
def test_a_row_that_went_another_way_than_asked_says_so_first_and_in_its_table(path: str, proven: dict[str, float], told: str) -> None:
    row = measured(case(path=path), proven=proven)
    assert way_told(row) == told
    text = page([result([row])], NOTHING)
    before, _, after = text.partition("<table class=grid>")
    astray = told.startswith("✗")
    escaped = told.replace(">", "&gt;").replace("<", "&lt;")
    assert escaped in after and ("class=astray" in after) is astray
    assert (escaped in before and "1 row did not go the way asked for" in before and "✗ 1 not as asked" in before) is astray


def test_rows_that_were_not_run_are_told_by_reason_with_every_size_and_depth() -> None:
    rows = [Row(case(tokens=tokens, queue_depth=depth), skipped=NO_GPU) for tokens, depth in ((16, 1), (1024, 1), (1024, 8))]
    rows.append(Row(case(Operation.EVICT, "ddr"), skipped="<no> room"))
    shown = Page(page([result(rows)], NOTHING))
    texts = [text.strip() for text in shown.texts]
    assert "4 rows not run on this machine, by reason" in texts and {NO_GPU, "<no> room"} <= set(texts)
    assert "3 rows: 3 restore by gds" in texts
    assert "Llama-3-8B, TP 1, bf16, restore by gds: 16 tokens; 1,024 tokens at depth 1, 8" in texts
    assert not shown.open and "no" not in shown.tags


def test_many_groups_and_long_tables_are_folded_and_few_are_not() -> None:
    def opened(rows: list[Row]) -> list[bool]:
        return ["open" in found for found in re.findall(r"<details class=group( open)?>", page([result(rows)], NOTHING))]

    assert opened(grid(models=2)) == [True, True]
    assert opened(grid(models=5)) == [True, False, False, False, False]
    assert "<details><summary>Table of 94 rows" in page([result(grid(models=1))], NOTHING)
    assert "<details open><summary>Table of 9 rows" in page([result(grid(models=1, sizes=(4096,))[:9])], NOTHING)


def test_a_grid_without_figures_tells_no_figures() -> None:
    assert "0 figures" not in page([result(grid(models=1))], NOTHING)
    assert "0 figures" in page([result([])], NOTHING)


def test_a_group_of_sizes_and_depths_has_every_plot(drawer: Drawer) -> None:
    (group,) = groups(row for row in grid(models=1, sizes=(16, 1024, 32768)) if row.case.queue_depth in (1, 2, 32))
    found = {plot.title.partition(" (")[0].partition(",")[0]: plot for plot in drawer.group(group)}
    assert list(found) == [
        "Latency against size",
        "Distribution of single requests",
        "Throughput against queue depth",
        "Ratio to ceiling",
        "What a byte costs the host",
        "Where the time went",
    ]
    latency = texts_of(found["Latency against size"].svg)
    assert {"gds", "bounce", "ddr", "host", "recompute, estimated", "p50 (line) to p99 (edge of the band)", "restore"} <= set(latency)
    assert {"16", "2 MiB", "32,768", "4 GiB"} <= set(latency) and any(text.startswith("evict (durable: gds, bounce, host; copied: ddr)") for text in latency)
    assert {"1", "2", "32", "the ceiling of that colour's path"} <= set(texts_of(found["Throughput against queue depth"].svg))
    assert "hatched: did not go the way asked for, or not all of it" in texts_of(found["Ratio to ceiling"].svg)
    assert "restore by gds: ceiling is bare KvikIO reads, 24 GB/s" in found["Ratio to ceiling"].key
    assert {"queue", "io", "checksum", "copy", "restore by gds, 32,768 tokens (4 GiB)"} <= set(texts_of(found["Where the time went"].svg))
    assert not any("total" in text for text in texts_of(found["Where the time went"].svg))


def test_a_machine_without_a_gpu_draws_what_it_has_and_says_why_memory_was_not_counted(drawer: Drawer) -> None:
    (group,) = groups(grid(gpu=False, models=1, sizes=(16, 1024)))
    found = {plot.title: plot for plot in drawer.group(group)}
    assert {"ddr", "host"} <= set(texts_of(found["Latency against size, queue depth 1"].svg))
    assert not {"gds", "bounce"} & {text for plot in found.values() for text in texts_of(plot.svg)}
    assert found["What a byte costs the host"].key == ["host memory traffic was not counted: perf_event_paranoid is 4, and no resctrl is mounted"]


def test_one_row_is_drawn_without_lines_and_one_group_without_overview(drawer: Drawer) -> None:
    (group,) = groups([measured(case())])
    titles = [plot.title for plot in drawer.group(group)]
    assert titles == ["Distribution of single requests", "Ratio to ceiling", "What a byte costs the host", "Where the time went"]
    assert drawer.overview([group]) == []
    bare = measured(case(), seconds=[0.1], request_count=1, stages={}, ceiling="", ceiling_gb_per_s=None, ratio=None, cpu_s_per_gb=0.0)
    (group,) = groups([msgspec.structs.replace(bare, memory_bytes_per_byte=None)])
    assert drawer.group(group) == []


def test_a_missing_ceiling_is_told_with_its_reason(drawer: Drawer) -> None:
    rows = [measured(case()), measured(case(path="bounce"), ceiling="reads failed: no room", ceiling_gb_per_s=None, ratio=None)]
    (group,) = groups(rows)
    (plot,) = (plot for plot in drawer.group(group) if plot.title == "Ratio to ceiling")
    assert "restore by bounce: no ceiling: reads failed: no room" in plot.key
    assert table_rows(page([result(rows)], NOTHING))[1][8:10] == ["reads failed: no room", ""]


def test_the_overview_compares_models_at_the_size_that_most_have(drawer: Drawer) -> None:
    (plot,) = drawer.overview(groups(grid(models=3)))
    texts = texts_of(plot.svg)
    assert plot.title == "All models at 4,096 tokens" and {"Llama-3-8B, TP 1, bf16", "Llama-3-8B, TP 1, fp8", "Llama-3-70B, TP 4, bf16"} <= set(texts)


def test_paths_unknown_to_the_page_are_drawn_too(drawer: Drawer) -> None:
    rows = [msgspec.structs.replace(measured(case(path="ddr", tokens=tokens)), case=case(path="remote", tokens=tokens)) for tokens in (16, 1024)]
    (group,) = groups(rows)
    assert "remote" in texts_of(drawer.group(group)[0].svg)


def drawn_texts(canvas: Any) -> list[Any]:
    """Without those of ticks that are out of sight, which matplotlib holds for later."""
    from matplotlib.text import Text

    hidden = set()
    for axis in (axis for axes in canvas.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {text for tick in ticks if not low <= tick.get_loc() <= high for text in (tick.label1, tick.label2)}
    return [text for text in canvas.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in hidden]


def overlapping(canvas: Any) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other, or on the edge of the canvas."""
    # Saving had another resolution.
    canvas.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(canvas)]
    clashes = [(one, other) for number, (one, box) in enumerate(boxes) for other, second in boxes[number + 1 :] if box.padded(-1).overlaps(second.padded(-1))]
    view = canvas.bbox
    return clashes + [(text, "edge") for text, box in boxes if not (view.x0 <= box.x0 and box.x1 <= view.x1 and view.y0 <= box.y0 and box.y1 <= view.y1)]


def test_no_text_of_a_plot_lies_on_another(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure as Canvas

    clashes: list[tuple[str, str]] = []
    save = Canvas.savefig

    def looked_at(self: Canvas, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        clashes.extend(overlapping(self))

    monkeypatch.setattr(Canvas, "savefig", looked_at)
    copied = [measured(case(Operation.EVICT, "bounce", tokens, ack="copied")) for tokens in (16, 1024)]
    every = groups([*grid(models=2), *copied, *(measured(case(operation, "ddr", tokens, gpu_count=0)) for operation in Operation for tokens in (16, 1024))])
    drawn = len(drawer.group(every[0])), len(drawer.overview(every))
    assert clashes == [] and drawn == (8, 1)


def test_the_command_makes_a_page_of_a_file_with_rows(tmp_path: Path, drawer: Drawer) -> None:
    record = {"name": "restore", "question": "", "tiny": False, "machine": {}, "facts": {}, "notes": {}, "figures": []}
    rows = [msgspec.to_builtins(row) for row in grid(gpu=False, models=1, sizes=(1024,))]
    (tmp_path / "one.json").write_text(json.dumps(record | {"rows": rows}))
    assert main([str(tmp_path / "one.json"), "-o", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not Page(text).open and NO_GPU in text and text.count("<svg") >= 5
