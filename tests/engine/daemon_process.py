"""A real daemon in a process of its own, on one arena and one volume, which can be stopped, killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from offloadd.client import AdminClient
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB

SERVE = (sys.executable, "-m", "offloadd", "serve", "--config")
SERVE_WITHOUT_VERIFY = (sys.executable, str(Path(__file__).with_name("daemon_without_verify.py")))

_WAIT_S = 60.0
#: Room for the longest socket name in the 107 bytes of a socket's path.
_RUNTIME_DIR_BYTES_MAX = 90


class DaemonProcess:
    """Use `start`, then any of `stop`, `kill` and `start` again. `counters` adds up all lives that were ended by `stop` or `kill`, and the present one."""

    def __init__(self, directory: Path, command: tuple[str, ...]) -> None:
        self._command = command
        self._short_dir: tempfile.TemporaryDirectory[str] | None = None
        self.runtime_dir = directory / "run"
        if len(os.fsencode(self.runtime_dir)) > _RUNTIME_DIR_BYTES_MAX:
            self._short_dir = tempfile.TemporaryDirectory(prefix="offloadd-", dir="/tmp")
            self.runtime_dir = Path(self._short_dir.name) / "run"
        self.volume = directory / "volume"
        format_volume(str(self.volume), volume_bytes=512 * MIB, slab_bytes=64 * MIB)
        self._config = directory / "offloadd.toml"
        self._config.write_text(
            f'[daemon]\nruntime_dir = "{self.runtime_dir}"\nmetrics_listen = ""\nlog_format = "text"\n'
            '[arena]\narena_bytes = "64 MiB"\nslab_bytes = "16 MiB"\nhuge_pages = "never"\n'
            f'[[volume]]\npath = "{self.volume}"\n'
        )
        self._log = directory / "daemon.log"
        self._notify_path = self.runtime_dir.with_name(self.runtime_dir.name + ".n")
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.bind(str(self._notify_path))
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []
        self._ended: Counter[str] = Counter()
        self.start_count = 0

    def start(self) -> None:
        """Returns when the daemon says that it is ready."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(self._notify_path)},
                start_new_session=True,
            )
        self._groups.append(self._process.pid)
        self.start_count += 1
        end_s = time.monotonic() + _WAIT_S
        self._notify.settimeout(0.2)
        while time.monotonic() < end_s:
            assert self._process.poll() is None, f"the daemon ended with status {self._process.returncode}"
            with suppress(TimeoutError):
                if b"READY=1" in self._notify.recv(4096):
                    return
        raise AssertionError(f"the daemon was not ready within {_WAIT_S:.0f} s")

    def stop(self) -> None:
        """SIGTERM, as a service manager does it."""
        self._end(signal.SIGTERM, expected_status=0)

    def kill(self) -> None:
        """SIGKILL to the daemon; its movers and keepers must notice by themselves."""
        self._end(signal.SIGKILL, expected_status=-signal.SIGKILL)

    def counters(self) -> Counter[str]:
        """The daemon's own counts, by name."""
        counts = Counter(self._ended)
        if self._process is not None:
            with AdminClient(self.runtime_dir) as admin:
                counts.update({counter.name: counter.value for counter in admin.status().counters})
        return counts

    def log_text(self) -> str:
        """All that the daemon logged so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        """End whatever is left."""
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_WAIT_S)
        self._notify.close()
        self._notify_path.unlink(missing_ok=True)
        if self._short_dir is not None:
            self._short_dir.cleanup()

    def _end(self, number: signal.Signals, *, expected_status: int) -> None:
        assert self._process is not None
        self._ended = self.counters()
        process, self._process = self._process, None
        process.send_signal(number)
        status = process.wait(_WAIT_S)
        assert status == expected_status, f"the daemon ended with status {status}"
