import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from offloadd.model.enums import Path as Way
from offloadd.offload.measure import NOT_YET
from offloadd.v1 import offload_pb2

from ..standin.build import Paths, build, compiler
from ..standin.controls import Control, Process, environment, wait_until
from ..standin.kernels import build_kernels
from ..standin_tests.child import PRELUDE, Child
from ..standin_tests.conftest import needs
from ..system.daemon_process import DaemonProcess
from ..transfer.kernels.devices import gcc

INSIDE = (Path(__file__).parent / "inside.py").read_text()


class Node:
    """A machine with GPUs, stand-ins or real ones: daemons and engines on it."""

    def __init__(self, folder: Path, environment: dict[str, str], control: Control | None) -> None:
        self.folder = folder
        self.environment = environment
        #: None on a real GPU, which no test can hold or break.
        self.control = control
        self.runtime = Path(tempfile.mkdtemp(prefix="ofl-"))
        self.daemons: list[DaemonProcess] = []
        self.engines: list[Child] = []

    def end_engines(self) -> None:
        """For nodes that several tests share: nothing is held or broken any more, and no engine lives."""
        assert self.control is not None
        self.control.reset()
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def daemon(self, *, gpus: tuple[str, ...] = ("cuda:0",), **options: object) -> DaemonProcess:
        number = len(self.daemons)
        folder = self.folder / f"daemon-{number}"
        folder.mkdir()
        daemon = DaemonProcess(folder=folder, runtime_dir=self.runtime / str(number), gpus=gpus, environment=self.environment, **options)  # type: ignore[arg-type]
        self.daemons.append(daemon)
        daemon.format()
        daemon.start()
        # A start waits two seconds for a volume, which a busy machine takes longer to open.
        daemon.wait_until(lambda: all(volume.state == "serving" for volume in daemon.status().volumes), "the volumes", timeout_s=60)
        return daemon

    def engine(self, ordinal: int = 0) -> Child:
        """A process with that GPU's context, and `GpuEngine`."""
        engine = Child(self.environment)
        self.engines.append(engine)
        engine.run(PRELUDE)
        engine.run(f"device = device_context({ordinal})")
        engine.run(INSIDE)
        return engine

    def mover(self, daemon: DaemonProcess, gpu: str = "cuda:0", *, after: Process | None = None) -> Process:
        """What the stand-ins know of a GPU's mover; with `after`, of the one that was started when that had ended, once it has its context."""
        assert self.control is not None
        found: list[Process] = []

        def come() -> bool:
            pid = daemon.worker_pid(f"mover {gpu}")
            found[:] = [process for process in self.control or () if process.pid == pid and process.counters.contexts_now]
            return bool(found) and (after is None or pid != after.pid)

        wait_until(come, f"a mover of {gpu}", timeout_s=30)
        return found[-1]

    def close(self) -> None:
        if self.control is not None:
            self.control.reset()
        for engine in self.engines:
            engine.close()
        for daemon in self.daemons:
            daemon.close()
            print(f"--- log of {daemon.folder.name}\n{daemon.log.read_text()}")
        rmtree(self.runtime, ignore_errors=True)


def gds_capability(daemon: DaemonProcess, device: str = "cuda:0", path: Way = Way.GDS) -> offload_pb2.PathCapability:
    (found,) = [one for one in daemon.status().paths if (one.path, one.device) == (path, device)]
    return found


def settled_gds(daemon: DaemonProcess, device: str = "cuda:0") -> tuple[bool, str]:
    """Whether there is a way past the host, and why not: once the mover has opened its lane and it was measured, or has given up."""

    def settled() -> bool:
        volumes = gds_capability(daemon, device).volumes
        return len(volumes) == len(daemon.volumes) and all(not one.note.startswith(NOT_YET) and (one.available or one.note) for one in volumes)

    daemon.wait_until(settled, "the opening of the gds lane", timeout_s=120)
    found = gds_capability(daemon, device)
    return found.available, found.note


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for the CPU."""
    if gcc() is None:
        pytest.skip("g++ is not installed")
    return build_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def standin_node(tmp_path: Path, paths: Paths, kernels: Path) -> Iterator[Node]:
    needs("cuda.bindings", "kvikio")
    control = Control.create(tmp_path / "control")
    node = Node(tmp_path, environment(paths, control, kernels=kernels), control)
    yield node
    node.close()


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory, paths: Paths) -> Iterator[Node]:
    """For tests whose faults a daemon survives: most of their time would be its start."""
    needs("cuda.bindings")
    folder = tmp_path_factory.mktemp("node")
    control = Control.create(folder / "control")
    node = Node(folder, environment(paths, control), control)
    yield node
    node.close()


@pytest.fixture(params=["standin", pytest.param("driver", marks=pytest.mark.gpu)])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    """For what must hold on a real GPU, too."""
    needs("cuda.bindings")
    if request.param == "standin":
        yield request.getfixturevalue("standin_node")
        return
    node = Node(tmp_path, dict(os.environ), None)
    yield node
    node.close()


@pytest.fixture
def make_engine() -> Callable[..., None]:
    """Code for `GpuEngine(...)` in an engine's process."""

    def make(engine: Child, daemon: DaemonProcess, **shape: object) -> None:
        engine.run(f"engine = GpuEngine({str(daemon.runtime_dir)!r}, **{shape!r})")

    return make
