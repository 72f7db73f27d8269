"""Where daemon and clients meet: the runtime directory and the names of the files in it."""

import os
from pathlib import Path

from offloadd.errors import NotAllowed

#: gRPC, for engines.
GRPC_SOCKET = "offloadd.sock"
#: SEQPACKET, for the attach protocol.
ATTACH_SOCKET = "attach.sock"
#: gRPC, for operators.
ADMIN_SOCKET = "admin.sock"
#: Locked by the daemon that owns the directory.
LOCK_FILE = "lock"

_SYSTEM_DIR = Path("/run/offloadd")


def runtime_dir_default() -> Path:
    """The directory used when none is given: $OFFLOADD_RUNTIME_DIR; else /run/offloadd for root or if it exists; else one of the user's own."""
    named = os.environ.get("OFFLOADD_RUNTIME_DIR")
    if named:
        return Path(named)
    if os.geteuid() == 0 or _SYSTEM_DIR.is_dir():
        return _SYSTEM_DIR
    of_user = os.environ.get("XDG_RUNTIME_DIR")
    if of_user:
        return Path(of_user) / "offloadd"
    return Path(f"/tmp/offloadd-{os.geteuid()}")


def refuse_foreign_dir(runtime_dir: Path) -> None:
    """Raise `NotAllowed` if anyone but root and the directory's owner could have put sockets of their own into it, or if a stranger owns a directory
    under /tmp: KV memory would be handed to whoever made it. A directory that does not exist passes."""
    try:
        status = runtime_dir.stat()
    except FileNotFoundError:
        return
    if status.st_mode & 0o002:
        raise NotAllowed(f"runtime directory {runtime_dir} has mode {status.st_mode & 0o7777:04o}: everybody may write to it")
    if runtime_dir.is_relative_to("/tmp") and status.st_uid not in (0, os.geteuid()):
        raise NotAllowed(f"runtime directory {runtime_dir} belongs to uid {status.st_uid}; uid {os.geteuid()} or root was expected")
