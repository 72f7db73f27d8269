"""A real `offloadd serve` under test: configured, started, killed and restarted by process id; its log is shown when a test fails."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from offloadd.client import AdminClient
from offloadd.errors import OffloaddError
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB

#: Ten times what a start takes on a busy small machine.
START_TIMEOUT_S = 60.0


@dataclass
class DaemonProcess:
    """One runtime directory with its volumes and, most of the time, a daemon."""

    folder: Path
    runtime_dir: Path
    volume_count: int = 1
    volume_bytes: int = 128 * MIB
    slab_bytes: int = 16 * MIB
    arena_bytes: int = 64 * MIB
    limits: dict[str, object] = field(default_factory=dict)
    mover: dict[str, object] = field(default_factory=lambda: {"verify_target": 1})
    open_slabs: int = 8
    io_threads: int = 8
    #: Further keys of each volume.
    volume_keys: dict[str, object] = field(default_factory=dict)
    #: Files of the daemon and its workers may not grow beyond this (RLIMIT_FSIZE): a disk that is full, without a disk.
    file_bytes_max: int = 0
    log_level: str = "info"
    #: A control group that the daemon and its workers are started in.
    cgroup: Path | None = None
    gpus: tuple[str, ...] = ()
    #: Not measured unless asked for: tests count what a mover does, and hold it.
    gpu_copies: str = "engines"
    #: Arguments of the interpreter; the configuration's path comes after them.
    command: tuple[str, ...] = ("-m", "offloadd", "serve", "--config")
    measure_interval_s: float = 0.0
    environment: dict[str, str] | None = None
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.volumes = [self.folder / f"volume-{number}" for number in range(self.volume_count)]
        self.config = self.folder / "offloadd.toml"
        self.log = self.folder / "daemon.log"

    def format(self) -> None:
        for volume in self.volumes:
            format_volume(volume, volume_bytes=self.volume_bytes, slab_bytes=self.slab_bytes)

    def write_config(self) -> None:
        def section(name: str, values: dict[str, object]) -> str:
            return f"[{name}]\n" + "".join(
                f"{key} = {str(value).lower() if isinstance(value, bool | int | float) else repr(value)}\n" for key, value in values.items()
            )

        text = section("daemon", {"runtime_dir": str(self.runtime_dir), "metrics_listen": "127.0.0.1:0", "log_format": "text", "log_level": self.log_level})
        text += section("arena", {"arena_bytes": self.arena_bytes, "slab_bytes": 16 * MIB, "huge_pages": "never"})
        text += section("mover", self.mover) + section("limits", self.limits)
        text += section("gpu", {"devices": list(self.gpus), "copies": self.gpu_copies, "measure_interval_s": float(self.measure_interval_s)})
        for volume in self.volumes:
            keys = {"path": str(volume), "open_slabs": self.open_slabs, "io_threads": self.io_threads, **self.volume_keys}
            text += "[[volume]]\n" + section("x", keys).split("\n", 1)[1]
        self.config.write_text(text)

    def start(self) -> None:
        self.write_config()
        with self.log.open("ab") as log:
            command = [sys.executable, *self.command, str(self.config)]
            before = "import os, resource, sys"
            if self.file_bytes_max:
                before += f"; resource.setrlimit(resource.RLIMIT_FSIZE, ({self.file_bytes_max},) * 2)"
            if self.cgroup is not None:
                before += f"; open({str(self.cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
            if self.file_bytes_max or self.cgroup is not None:
                # The first argument of execv is the program, sys.argv[1] the name that it gets.
                command = [sys.executable, "-c", before + "; os.execv(sys.executable, sys.argv[1:])", *command]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the daemon ended at start with {self.process.returncode}:\n{self.log.read_text()}"
            try:
                with AdminClient(self.runtime_dir) as admin:
                    if admin.status().pid == self.process.pid:
                        return
            except OffloaddError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"the daemon was not ready in {START_TIMEOUT_S} s:\n{self.log.read_text()}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(START_TIMEOUT_S)
        self.process = None
        return status

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.start()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def status(self):  # type: ignore[no-untyped-def]
        with AdminClient(self.runtime_dir) as admin:
            return admin.status()

    def counters(self) -> dict[str, int]:
        return {counter.name: counter.value for counter in self.status().counters}

    def wait_until(self, condition, what: str, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen in {timeout_s} s\n{self.log.read_text()}"
            time.sleep(0.02)

    def worker_pid(self, name: str) -> int:
        return next(worker.pid for worker in self.status().workers if worker.name.startswith(name))

    def kill_worker(self, name: str) -> int:
        pid = self.worker_pid(name)
        assert pid > 0
        os.kill(pid, signal.SIGKILL)
        return pid
