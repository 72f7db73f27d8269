"""Every benchmark runs, tiny, from its command to its record. Figures of a tiny run mean nothing and are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "with benchmark(" in path.read_text())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_and_leaves_a_record(name: str, directory: Path) -> None:
    volumes, results = directory / f"{name}-volumes", directory / "results"
    command = [sys.executable, "-m", f"bench.{name}", "--tiny", "--dir", str(volumes), "--results", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    record = json.loads((results / f"{name}.json").read_text())
    assert record["name"] == name and record["tiny"] is True
    for fact in ("machine", "cpu", "cores", "memory_gib", "kernel", "file_system", "device", "python", "offloadd", "numpy", "grpcio", "commit", "date"):
        assert record["machine"][fact] not in ("", None), fact
    # Of a GPU there are figures or reasons; tests of its own run it over the stand-ins.
    assert len(record["figures"]) >= 5 or (name == "gpu_figures" and all(fact.startswith("skipped: ") for fact in record["facts"]))
    assert all(figure["value"] >= 0 and figure["unit"] for figure in record["figures"])
    assert record["question"].split()[0] in done.stdout
    assert not list(volumes.iterdir()), "a benchmark left its volumes behind"


def test_every_benchmark_is_listed() -> None:
    assert {"dispatch", "gpu_figures", "index_scale", "interference", "lookup", "recovery", "restore_latency"} <= set(BENCHMARKS)
