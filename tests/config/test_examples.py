"""The files under systemd/ say what the code says."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from offloadd.config import ArenaConfig, BreakerConfig, Config, DaemonConfig, GpuConfig, LimitsConfig, MoverConfig, TracingConfig, VolumeConfig, load_config

SYSTEMD = Path(__file__).parents[2] / "systemd"
#: Their defaults depend on the machine.
COMMENTED = {"runtime_dir", "arena_bytes", "index_bytes_max", "lane_threads", "devices"}


def test_the_example_equals_the_defaults() -> None:
    assert load_config(SYSTEMD / "offloadd.toml") == Config()


def test_the_example_has_every_key() -> None:
    text = (SYSTEMD / "offloadd.toml").read_text()
    uncommented = re.sub(r"^#(\w+ = |\[\[)", r"\1", text, flags=re.MULTILINE)
    sections = {
        "daemon": DaemonConfig,
        "limits": LimitsConfig,
        "arena": ArenaConfig,
        "mover": MoverConfig,
        "gpu": GpuConfig,
        "breaker": BreakerConfig,
        "tracing": TracingConfig,
    }
    values = tomllib.loads(text)
    everything = tomllib.loads(uncommented)
    assert set(everything) == {*sections, "volume"}
    for name, section in sections.items():
        assert set(values[name]) == set(section.model_fields) - COMMENTED
        assert set(everything[name]) == set(section.model_fields)
    (volume,) = everything["volume"]
    assert set(volume) == set(VolumeConfig.model_fields)
    assert VolumeConfig.model_validate(volume) == VolumeConfig(path=volume["path"])


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    systemd_analyze = shutil.which("systemd-analyze")
    if systemd_analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # verify insists on a program that exists.
    text = (SYSTEMD / "offloadd.service").read_text().replace("/usr/local/bin/offloadd", sys.executable)
    unit = tmp_path / "offloadd.service"
    unit.write_text(text)
    done = subprocess.run([systemd_analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    # Other units of the machine are none of our business.
    assert [line for line in (done.stdout + done.stderr).splitlines() if "offloadd" in line] == []


def test_the_unit_is_hardened(tmp_path: Path) -> None:
    systemd_analyze = shutil.which("systemd-analyze")
    if systemd_analyze is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        [systemd_analyze, "security", "--offline=true", str(SYSTEMD / "offloadd.service")], capture_output=True, text=True, timeout=60, check=False
    )
    exposure = re.search(r"Overall exposure level for offloadd\.service: ([0-9.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    # A bare unit scores 9.6. What keeps ours from 0: a GPU, loopback, NUMA binding and the uids of its peers.
    assert float(exposure.group(1)) <= 1.6
    told = re.search(r"rates its exposure at most ([0-9.]+) of 10", (SYSTEMD.parent / "README.md").read_text())
    assert told is not None and float(told.group(1)) == 1.6


def test_the_unit_is_ready_when_the_daemon_says_so_and_has_a_watchdog_and_a_directory() -> None:
    lines = (SYSTEMD / "offloadd.service").read_text().splitlines()
    for line in ("Type=notify", "NotifyAccess=main", "WatchdogSec=30", "RuntimeDirectory=offloadd", "RuntimeDirectoryMode=0750", "Restart=on-failure"):
        assert line in lines
    # READY and the feeding of the watchdog by the event loop: tests/system/test_drain.py and tests/daemon/test_notify.py.
    assert not any(line.startswith("ExecStartPost") for line in lines), "readiness is the daemon's to tell"
