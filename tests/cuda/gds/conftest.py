import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...doctor.tree import Tree
from ...standin.build import Paths, build, compiler
from ...standin.controls import Control, environment
from ...standin_tests.child import PRELUDE, Child
from ...standin_tests.conftest import needs

SLOT = 1 << 20
VOLUME_BYTES = 8 * SLOT

#: A mover's process: cuFile is set up by `set_up`, and what it makes is closed by `tear_down`. `MACHINE` is a tree that hides nothing, `PROC` its `/proc`.
INSIDE = """
import faulthandler, threading
from pathlib import Path
from offloadd.cuda.cufile_stats import CufileStats, PathCounts, Way
from offloadd.cuda.device import Device
from offloadd.cuda.gds import GdsVolume, ShortTransfer, StagingSlot
from offloadd.cuda.gds_setup import GdsUnavailable, configure
from offloadd.cuda.group_sync import GroupSync, VolumeDoomed
from offloadd.cuda.probe import ProbeResult, probe
from offloadd.machine.system import System

device = Device.open("cuda:0")

def set_up(task_bytes=SLOT_BYTES, threads=4):
    global gds, slot, volume, data_fd, synced_fd
    gds = configure(device, task_bytes=task_bytes, threads=threads, proc=Path(PROC), timeout_s=60)
    slot = StagingSlot.allocate(device, SLOT_BYTES)
    data_fd = os.open(PATH, os.O_RDWR | os.O_DIRECT)
    synced_fd = os.open(PATH, os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
    volume = GdsVolume.open(gds, data_fd, synced_fd)

def tear_down():
    volume.close()
    slot.close()
    gds.close()
    os.close(data_fd)
    os.close(synced_fd)

def failure(call):
    try:
        call()
    except OSError as error:
        return [type(error).__name__, error.errno, str(error)]
    except Exception as error:
        return [type(error).__name__, None, str(error)]
    return None

def unavailable(call):
    try:
        call()
    except GdsUnavailable as error:
        return [error.reason, str(error)]

def told(result):
    return [result.available, result.way, result.reason, result.why]
"""


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc, which builds the stand-ins, is not installed")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = Control.create(tmp_path / "control")
    yield control
    control.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A volume: a file with random bytes."""
    path = tmp_path / "volume"
    path.write_bytes(os.urandom(VOLUME_BYTES))
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Tree:
    """A machine with all that cuFile looks for, and a virtual disk."""
    return Tree(tmp_path / "machine")


@pytest.fixture
def make_mover(paths: Paths, control: Control, path: Path, machine: Tree) -> Iterator[Callable[[], Child]]:
    needs("cuda.bindings", "kvikio")
    made: list[Child] = []

    def make() -> Child:
        child = Child({key: value for key, value in environment(paths, control).items() if key != "CUDA_VISIBLE_DEVICES"})
        made.append(child)
        child.run(f"SLOT_BYTES, PATH, PROC, MACHINE = {SLOT}, {str(path)!r}, {str(machine.root / 'proc')!r}, {str(machine.root)!r}")
        child.run(PRELUDE)
        child.run(INSIDE)
        return child

    yield make
    control.reset()
    for child in made:
        child.close()


@pytest.fixture
def mover(make_mover: Callable[[], Child]) -> Child:
    """One that is set up, over nvidia-fs unless the test sets another mode first."""
    child = make_mover()
    child.run("set_up()")
    return child
