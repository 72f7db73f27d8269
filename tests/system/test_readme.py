"""What the README tells a newcomer to run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from .daemon_process import DaemonProcess

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_the_readme_restores_what_it_evicted(daemon: DaemonProcess) -> None:
    code, _on_a_gpu = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OFFLOADD_RUNTIME_DIR": str(daemon.runtime_dir)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    evicted, restored = done.stdout.splitlines()
    assert evicted.startswith("8 (PathUse(tier=<Tier.VOLUME: 2>, path=<Path.HOST: 4>, block_count=8")
    assert restored == "8 True"
