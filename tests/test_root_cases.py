"""A case that needs root and could have run, but was skipped, is listed, and fails the run that asks for it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONFTEST = """
import os
from tests import root
os.geteuid = lambda: {uid}
pytest_addoption = root.add_options
def pytest_configure(config):
    config.addinivalue_line("markers", "root: needs root")
    config.pluginmanager.register(root.RootCases(config))
"""

CASES = """
import pytest
from tests.root import Facility, needs_root

def not_here():
    raise OSError("no such thing")

@pytest.mark.root
def test_runs():
    needs_root()

@pytest.mark.root
def test_misses_a_facility():
    needs_root(Facility("loops of gold", not_here))

@pytest.mark.skipif({other}, reason="gcc is not installed")
@pytest.mark.root
def test_is_skipped():
    needs_root()
"""


@pytest.mark.parametrize(
    ("uid", "other", "asked", "status"),
    [
        (1000, False, True, 0),
        (0, False, True, 0),
        (0, True, True, 1),
        (0, True, False, 0),
    ],
    ids=["without root", "with root, and a facility is missing", "with root, skipped for something else", "the same, and nobody asks"],
)
def test_a_skip_fails_the_run_where_the_case_could_have_run(tmp_path: Path, uid: int, other: bool, asked: bool, status: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(uid=uid))
    (tmp_path / "test_cases.py").write_text(CASES.format(other=other))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), f"--rootdir={tmp_path}", *(["--root-cases-run"] if asked else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    listed = done.stdout.partition("cases that need root and were not run")[2]
    assert ("test_runs: needs root" in listed) == (uid != 0)
    assert ("loops of gold (no such thing)" in listed) == (uid == 0)
    assert ("gcc is not installed (FAILS this run" in listed) == bool(status)
