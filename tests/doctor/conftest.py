from pathlib import Path

import pytest

from .tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A bare virtual machine."""
    return Tree(tmp_path / "root")
