"""The names under which benchmarks tell which way bytes went."""

from offloadd.client import PathUse, Way


def way_of(use: PathUse) -> str:
    """The way that bytes really went: of those that were handed to cuFile which of its ways, else the path."""
    return use.path.name.lower() if use.way is Way.PLAIN else use.way.label
