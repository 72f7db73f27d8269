"""The grid on this machine, whatever it has: rows that run are proven, and those that can't say why. Figures are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from bench.grid.volumes import refuse_given
from bench.support.rows import Row
from bench.support.service import Service
from offloadd.client import AdminClient
from offloadd.errors import VolumeNotEmpty
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB

ROOT = Path(__file__).resolve().parents[2]


def test_rows_that_run_are_proven_and_rows_that_cannot_say_why(tmp_path: Path) -> None:
    given, new = tmp_path / "given.volume", tmp_path / "new.volume"
    geometry = format_volume(str(given), volume_bytes=192 * MIB, slab_bytes=16 * MIB)
    options = ["--tokens", "40", "--depths", "2", "--rounds", "1", "--gpus", "1", "--volumes", str(given), str(new), "--layout", "cross-layer"]
    command = [sys.executable, "-m", "bench.restore_latency", "--tiny", "--part", "grid", "--paths", "host", "bounce", "recompute", *options]
    command += ["--dir", str(tmp_path / "volumes"), "--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    record = json.loads((tmp_path / "results" / "restore_latency.json").read_text())
    rows = msgspec.convert(record["rows"], list[Row])
    by_path = {path: [row for row in rows if row.case.path == path] for path in ("host", "bounce", "recompute")}
    assert {(row.case.operation.value, row.case.volume_count, row.case.block_count) for row in by_path["host"]} == {
        (operation, count, 3) for operation in ("evict", "restore") for count in (1, 2)
    }
    for row in by_path["host"]:
        assert row.proven == {"host": 1.0} and row.ratio and row.ceiling_gb_per_s and row.ceiling.startswith("raw "), row
        assert row.request_count == len(row.seconds) == 32 and row.seconds == sorted(row.seconds)
        assert set(row.stages) == {"queue_s", "copy_s", "checksum_s", "io_s", "total_s"} and row.cpu_s_per_gb > 0
        assert (row.memory_bytes_per_byte is None) == (row.memory_note == record["facts"]["memory_traffic"] and "no counters" in row.memory_note)
    # A real GPU, where there is one, has them; any other machine has the daemon's words.
    for row in by_path["bounce"]:
        assert row.proven == {"bounce": 1.0} or (row.skipped.startswith("cuda:0: ") and not row.seconds), row
    assert [row.estimated for row in by_path["recompute"]] == [True]
    assert record["facts"]["layout"] == "cross-layer" and "efficiency" not in record["facts"] and "50% is assumed" in record["facts"]["recompute"]

    assert not new.exists() and not list((tmp_path / "volumes").iterdir()) and not list(tmp_path.glob("*.ceiling"))
    # The volume that was given is the one that it was, and says that something was in it.
    try:
        refuse_given(given)
    except VolumeNotEmpty as error:
        assert "--force-blocks" in str(error)
    else:
        raise AssertionError("blocks were evicted, but no slab was cut")
    assert geometry.volume_uuid in given.read_bytes()[: 2 * MIB]
    with Service(volumes=[given], open_slabs=8, index_bytes_max=16 * MIB) as service:
        service.ready_s()
        service.event("volume is recovered")
        with AdminClient(service.runtime_dir, timeout_s=60) as admin:
            (volume,) = admin.volumes()
        service.stop()
    assert volume.cut_count > 0 and volume.block_count == 0, "blocks of the benchmark were left behind"


def test_volumes_are_written_once_where_only_restores_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.restore_latency", "--tiny", "--part", "grid", "--paths", "host", "--operations", "restore", "--gpus", "0"]
    command += ["--tokens", "16", "--depths", "1", "--rounds", "1", "--dir", str(tmp_path / "volumes"), "--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results" / "restore_latency.json").read_text())
    assert record["facts"]["volumes_filled"] == "once before anything was measured"
    assert [row["proven"] for row in record["rows"]] == [{"host": 1.0}]
