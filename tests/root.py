"""Cases that need root. Where they can't run they are skipped and listed at the end of the run; `.ci/run` fails where one could have run, and was skipped.

    pytestmark = pytest.mark.root
    needs_root(LOOP_DEVICES, BLKIO)     # in a fixture or a test: skips, and says what is missing

A container's root may be without a facility: that is found out by using it, and such a skip is listed and forgiven. Any other skip of such a case is not.
"""

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

#: The blkio controller of cgroup v1.
BLKIO_CONTROLLER = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Facility:
    """Something of the machine that a case needs besides root. `use` uses it, and raises OSError or CalledProcessError where it is not there."""

    name: str
    use: Callable[[], None]

    def __str__(self) -> str:
        return self.name


def _attach_loop_device() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 20)
        device = subprocess.run(["losetup", "--find", "--show", file.name], capture_output=True, text=True, check=True).stdout.strip()
        subprocess.run(["losetup", "--detach", device], capture_output=True, check=True)


def _make_blkio_group() -> None:
    group = BLKIO_CONTROLLER / f"offloadd-probe-{os.getpid()}"
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").read_text()
    finally:
        group.rmdir()


def _make_device_node() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mknod(Path(folder) / "node", 0o600 | stat.S_IFBLK, os.makedev(259, 1))


LOOP_DEVICES = Facility("loop devices", _attach_loop_device)
BLKIO = Facility("the blkio controller of cgroup v1", _make_blkio_group)
DEVICE_NODES = Facility("device nodes", _make_device_node)


@cache
def _why_not(facility: Facility) -> str:
    try:
        facility.use()
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return ""


_NOT_ROOT = "needs root"
_NO_FACILITY = "needs root, which is here, and what this machine has not: "


def needs_root(*facilities: Facility) -> None:
    """Skip the case where it can't run."""
    if os.geteuid() != 0:
        pytest.skip(_NOT_ROOT)
    missing = [f"{facility} ({why})" for facility in facilities if (why := _why_not(facility))]
    if missing:
        pytest.skip(_NO_FACILITY + ", ".join(missing))


def add_options(parser: pytest.Parser) -> None:
    """`--root-cases-run`."""
    parser.addoption(
        "--root-cases-run", action="store_true", help="Fail where a case that needs root was skipped although root, and what else it needs, is there."
    )


class RootCases:
    """The plugin that lists the cases that need root and were skipped, and fails the run if that is asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self._fails = bool(config.getoption("--root-cases-run"))
        self._marked: set[str] = set()
        self._skipped: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Which they are."""
        self._marked = {item.nodeid for item in items if item.get_closest_marker("root") is not None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Which were skipped."""
        if report.skipped and report.nodeid in self._marked and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    @property
    def _unforgiven(self) -> list[str]:
        """Those that could have run: root is there, and what they missed is not what the machine has not."""
        if not self._fails or os.geteuid() != 0:
            return []
        return [name for name, why in self._skipped.items() if not why.startswith(_NO_FACILITY)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run in which every test that ran passed may fail all the same."""
        if self._unforgiven and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The list."""
        if not self._skipped:
            return
        terminalreporter.write_sep("=", "cases that need root and were not run")
        for name, why in sorted(self._skipped.items()):
            verdict = " (FAILS this run: root is there)" if name in self._unforgiven else ""
            terminalreporter.write_line(f"{name}: {why}{verdict}")
