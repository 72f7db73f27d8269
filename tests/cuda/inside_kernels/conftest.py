"""For checks that run over the stand-in with the double of CuPy, which keeps memory and a context for the life of the process."""

from collections.abc import Iterator

import pytest

from offloadd.cuda.device import Device
from offloadd.transfer.kernels.copies import KernelCopies
from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels

from ...standin.controls import Control, Process
from ..inside.check_copies import bench
from ..inside.conftest import STANDIN, shared_control

__all__ = ["STANDIN", "bench", "shared_control"]


@pytest.fixture(autouse=True)
def nothing_is_left(shared_control: Control | None, device: Device) -> Iterator[None]:
    """The process never waited for a whole device."""
    yield
    if shared_control is not None:
        shared_control.reset()
        assert shared_control.process().counters.context_synchronizes == 0


@pytest.fixture
def control(shared_control: Control | None) -> Control:
    if shared_control is None:
        pytest.skip("only a stand-in counts and breaks")
    return shared_control


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """Held as long as the kernels that were compiled for it."""
    yield Device.open("cuda:0")


@pytest.fixture(scope="session")
def kernels(device: Device) -> KernelCopies:
    return KernelCopies(device, open_cupy_kernels(device.ordinal))


@pytest.fixture
def ours(device: Device, control: Control) -> Process:
    """The stand-in's record of this process."""
    return control.process()
