from collections.abc import Iterator
from pathlib import Path

import pytest

from .daemon_double import Double


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    path.mkdir(mode=0o750)
    return path


@pytest.fixture
def double(runtime_dir: Path) -> Iterator[Double]:
    made = Double(runtime_dir)
    yield made
    made.close()
