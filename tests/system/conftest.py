import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from offloadd.client import Client

from .daemon_process import DaemonProcess


@pytest.fixture
def make_daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., DaemonProcess]]:
    """Makes daemons with volumes under tmp_path; a socket path may have 107 bytes, so the runtime directory is a short one."""
    made: list[DaemonProcess] = []
    runtime = Path(tempfile.mkdtemp(prefix="ofl-"))

    def make(**options: object) -> DaemonProcess:
        folder = tmp_path / f"daemon-{len(made)}"
        folder.mkdir()
        daemon = DaemonProcess(folder=folder, runtime_dir=runtime / str(len(made)), **options)  # type: ignore[arg-type]
        made.append(daemon)
        daemon.format()
        daemon.start()
        return daemon

    yield make
    for daemon in made:
        daemon.close()
        print(f"--- log of {daemon.folder.name}\n{daemon.log.read_text()}")
    rmtree(runtime, ignore_errors=True)


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as connected:
        yield connected
