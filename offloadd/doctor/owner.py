"""The daemon that holds a runtime directory, found without touching its lock."""

import os
import re

from offloadd.machine.system import System
from offloadd.model.runtime import LOCK_FILE


def lock_owner(system: System, runtime_dir: str) -> str | None:
    """Process id of the daemon that holds the lock; None if nobody is seen to hold it. Raises OSError if the lock's file is there and can't be read.

    The lock is looked up in /proc/locks and never tried: for the time of a trial a daemon that starts would be refused.
    """
    path = system.path(f"{runtime_dir}/{LOCK_FILE}")
    try:
        status, written = path.stat(), path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for pid, locked_device, inode in re.findall(
        r"FLOCK\s+\S+\s+WRITE\s+(-?[0-9]+)\s+([0-9a-f]+:[0-9a-f]+):([0-9]+)\s", f"{system.text('/proc/locks') or ''}\n"
    ):
        # Some file systems show another device number there than to stat; then the process id in the file decides.
        if int(inode) == status.st_ino and (locked_device == device or pid == written):
            return written or pid
    return None
