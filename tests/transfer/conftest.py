"""The implementations of gather and scatter that the suite runs against."""

import os
from types import SimpleNamespace

import pytest

from offloadd.transfer import gather as by_numpy
from offloadd.transfer.native import Library

from .moves import WIDTHS, build, compiler


@pytest.fixture(scope="session", params=WIDTHS)
def native(request, tmp_path_factory):
    """The C library, for each width of instructions. `OFFLOADD_TEST_MOVES`: the path of another build, for test_native_sanitizers.py."""
    if path := os.environ.get("OFFLOADD_TEST_MOVES"):
        return Library(path)
    if compiler() is None:
        pytest.skip("no C compiler")
    return Library(build(tmp_path_factory.mktemp("moves"), width=request.param))


@pytest.fixture(scope="session", params=["numpy", *WIDTHS])
def moves(request, tmp_path_factory):
    """`gather` and `scatter` by NumPy and by the C library."""
    if request.param == "numpy":
        return SimpleNamespace(gather=by_numpy.gather, scatter=by_numpy.scatter)
    if compiler() is None:
        pytest.skip("no C compiler")
    library = Library(build(tmp_path_factory.mktemp("moves"), width=request.param))

    def mover(name):
        return lambda views, indices, ours, first=0, last=None: getattr(library.pieces(views), name)(indices, ours, first, last)

    return SimpleNamespace(gather=mover("gather"), scatter=mover("scatter"))
