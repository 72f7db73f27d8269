"""Settings that hold for all tests."""

import pytest
from hypothesis import settings

from . import root, torture
from .torture import rounds, within

__all__ = ["rounds", "within"]

# A slow machine is no failure.
settings.register_profile("offloadd", deadline=None, print_blob=True)
settings.load_profile("offloadd")


def pytest_addoption(parser: pytest.Parser) -> None:
    torture.add_options(parser)
    root.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(root.RootCases(config))
    if config.getoption("--torture") is not None:
        config.pluginmanager.register(torture.Torture(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU, unless -m asks for it."""
    if "gpu" in str(config.getoption("-m")):
        return
    wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu") is not None])
    items[:] = wanted
