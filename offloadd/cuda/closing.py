"""Giving several things of the driver's back at once."""

from collections.abc import Sequence
from typing import Protocol

from offloadd.cuda.driver import CudaError


class Closable(Protocol):
    """Something of the driver's."""

    def close(self) -> None:
        """Give it back."""


def close_all(things: Sequence[Closable]) -> None:
    """Close all, also when one can't be, and raise the first error then."""
    first: Exception | None = None
    for thing in things:
        try:
            thing.close()
        except CudaError as error:
            first = first or error
    if first is not None:
        raise first
