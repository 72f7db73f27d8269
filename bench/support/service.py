"""`offloadd serve` as a process of its own, with the moments that it reports: READY by sd_notify, recoveries in its log."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.support.machine import ROOT

TIMEOUT_S = 120.0


class Service:
    """A context manager. Seconds count from the spawn of the process, interpreter start included."""

    def __init__(
        self,
        *,
        volumes: Sequence[Path],
        open_slabs: int,
        index_bytes_max: int,
        arena_bytes: int = 0,
        gpus: Sequence[str] = (),
        command: Sequence[str] = ("-m", "offloadd", "serve", "--config"),
    ) -> None:
        """`command`: the interpreter's arguments, before the configuration's path."""
        self._directory = tempfile.TemporaryDirectory(prefix="offloadd-bench-")
        directory = Path(self._directory.name)
        self.runtime_dir = directory / "run"
        config = directory / "offloadd.toml"
        # Moves that the daemon makes to measure its paths would run beside ceilings, when nothing else moves: only at the start (`settled_paths`).
        config.write_text(
            f'[daemon]\nruntime_dir = "{self.runtime_dir}"\nlog_format = "json"\nmetrics_listen = ""\n'
            f"[limits]\nindex_bytes_max = {index_bytes_max}\n[arena]\narena_bytes = {arena_bytes}\n"
            f"[gpu]\ndevices = {json.dumps(list(gpus))}\nmeasure_interval_s = 0\n"
            + "".join(f"[[volume]]\npath = {json.dumps(str(volume))}\nopen_slabs = {open_slabs}\n" for volume in volumes)
        )
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(directory / "notify"))
        self._changed = threading.Condition()
        self._events: list[tuple[float, dict[str, Any]]] = []
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *command, str(config)],
            env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, name="log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event: dict[str, Any] = msgspec.json.decode(line)
            except msgspec.DecodeError:
                event = {"event": "unreadable", "line": line.decode(errors="replace")}
            with self._changed:
                self._events.append((time.monotonic() - self._start, event))
                self._changed.notify_all()

    def ready_s(self) -> float:
        """Wait for READY=1; seconds since the start."""
        while time.monotonic() - self._start < TIMEOUT_S:
            readable, _, _ = select.select([self._notify], [], [], 0.5)
            if readable and b"READY=1" in self._notify.recv(4096):
                return time.monotonic() - self._start
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon exited with status {self.process.returncode}: {self.log()}")
        raise TimeoutError(f"no READY within {TIMEOUT_S} s: {self.log()}")

    def event(self, name: str) -> tuple[float, dict[str, Any]]:
        """Wait for the first log line with this event; seconds since the start, and its fields."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(event.get("event") == name for _, event in self._events), TIMEOUT_S)
            if not found:
                raise TimeoutError(f"no {name!r} within {TIMEOUT_S} s: {self._events}")
            return next((seconds, event) for seconds, event in self._events if event.get("event") == name)

    def log(self) -> list[dict[str, Any]]:
        """All log lines so far."""
        with self._changed:
            return [event for _, event in self._events]

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)

    def stop(self) -> float:
        """SIGTERM, and wait; seconds it took. RuntimeError unless it exits 0."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(TIMEOUT_S)
        if status:
            raise RuntimeError(f"the daemon exited with status {status}: {self.log()}")
        return time.monotonic() - start

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._notify.close()
        self._directory.cleanup()
