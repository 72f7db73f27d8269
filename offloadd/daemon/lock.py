"""One daemon per runtime directory: a lock taken before any socket is bound."""

import fcntl
import os
from pathlib import Path

from offloadd.errors import AlreadyRunning
from offloadd.model.runtime import LOCK_FILE

RUNTIME_DIR_MODE = 0o750


class RuntimeDirectory:
    """The directory of the sockets, locked. gRPC would silently steal a live daemon's socket, so the lock comes first; it lives as long as the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self) -> None:
        """Make the directory if needed and lock it. Raises `AlreadyRunning` naming the owner's process id."""
        self.path.mkdir(mode=RUNTIME_DIR_MODE, parents=True, exist_ok=True)
        fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise AlreadyRunning(f"a daemon (pid {owner}) already serves {self.path}; stop it, or give this one another daemon.runtime_dir") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the directory up. The file stays: removing it would let two daemons lock two files of one name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
