"""What checks use that run in a process with a driver: the stand-in, or a real one if OFFLOADD_TEST_STANDIN is not set."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offloadd.cuda.device import Device

from ...standin.build import Paths
from ...standin.controls import Control, Loaded, Process, load
from ...standin_tests.child import PRELUDE, Child

STANDIN = os.environ.get("OFFLOADD_TEST_STANDIN")


@pytest.fixture(scope="session")
def shared_control() -> Control | None:
    return Control(Path(os.environ["CUDA_STANDIN_CONTROL"])) if STANDIN else None


@pytest.fixture(scope="session")
def loaded(shared_control: Control | None) -> Loaded:
    assert STANDIN and shared_control
    return load(Paths(Path(STANDIN), Path(STANDIN) / "libcuda.so.1", Path(STANDIN) / "libcufile.so.0"), shared_control)


@pytest.fixture
def control(shared_control: Control | None) -> Control:
    assert shared_control is not None
    return shared_control


@pytest.fixture(autouse=True)
def nothing_is_left(shared_control: Control | None) -> Iterator[None]:
    """After every check this process holds nothing of the driver, and never waited for a whole device."""
    yield
    if shared_control is None:
        return
    shared_control.reset()
    counters = shared_control.process().counters
    assert counters.held == {}
    assert counters.context_synchronizes == 0


@pytest.fixture
def device(nothing_is_left: None) -> Iterator[Device]:
    device = Device.open("cuda:0")
    yield device
    device.close()


@pytest.fixture
def ours(device: Device, control: Control) -> Process:
    """The stand-in's record of this process."""
    return control.process()


@pytest.fixture
def make_engine(nothing_is_left: None) -> Iterator[Callable[[], Child]]:
    """Makes engine processes: each has the names of PRELUDE, and the context of a device."""
    made: list[Child] = []

    def make(ordinal: int = 0) -> Child:
        child = Child(os.environ)
        made.append(child)
        child.run(PRELUDE)
        child.run(f"device = device_context({ordinal})")
        return child

    yield make
    for child in made:
        child.close()


@pytest.fixture
def engine(make_engine: Callable[[], Child]) -> Child:
    return make_engine()
