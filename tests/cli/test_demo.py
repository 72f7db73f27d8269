"""The demo, small: it is what a newcomer sees first."""

import subprocess
import sys
from pathlib import Path


def test_the_demo_verifies_each_tier_and_shows_gpu_paths_without_a_number(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offloadd", "demo", "--tokens", "64", "--rounds", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["arena,", "ddr"] for line in lines)
    assert any(line.split()[:2] == ["volume,", "host"] for line in lines)
    for path in ("bounce", "gds"):
        (line,) = [line for line in lines if line.startswith(f"volume, {path}")]
        assert line.endswith("not available: no CUDA device")
    assert "4 sequences (32 MiB) compared: every byte as it was evicted." in done.stdout
    assert [path.name for path in (tmp_path / ".demo").iterdir() if path.name.startswith("volume")] == [], "the demo leaves its volume behind"
