import os

import pytest

from offloadd.memory.memfd import create_sealed, map_shared
from offloadd.mover.messages import Mapped
from offloadd.units import MIB

from .mover_harness import Engine, Mover, VolumeFile, plain

ARENA_BYTES = 96 * MIB


@pytest.fixture(params=["--no-native", None], ids=["numpy", "as_built"])
def mover(request):
    """By NumPy, and by the C library where it was built."""
    mover = Mover(*filter(None, [request.param]))
    yield mover
    mover.close()


@pytest.fixture
def volume(tmp_path):
    volume = VolumeFile(tmp_path / "volume").create()
    yield volume
    volume.close()


@pytest.fixture
def make_engine(mover):
    engines = []

    def make(layout=None, memory_bytes=None, *, number=1, seed=1):
        if layout is None:
            layout, memory_bytes = plain(16, 20000)
        engine = Engine(layout, memory_bytes)
        engine.fill(seed)
        engines.append(engine)
        assert mover.map_region(engine, number) == Mapped(region=number)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def arena(mover):
    fd = create_sealed("arena", ARENA_BYTES)
    mover.map_arena(fd, ARENA_BYTES)
    mapped = map_shared(fd, ARENA_BYTES)
    yield mapped
    mapped.close()
    os.close(fd)
