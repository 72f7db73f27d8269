"""Daemon checks: configuration, runtime directory, and whether a daemon runs there already."""

import os
import socket
from collections.abc import Iterator
from pathlib import PurePosixPath

from offloadd.doctor.finding import Finding, fail, ok, warn
from offloadd.doctor.owner import lock_owner
from offloadd.doctor.subject import Machine
from offloadd.errors import NotAllowed
from offloadd.machine.system import System
from offloadd.model.runtime import GRPC_SOCKET, LOCK_FILE, refuse_foreign_dir
from offloadd.units import format_bytes

_CONNECT_S = 2.0


def check_config(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the configuration file is right."""
    settings = machine.settings
    if settings.error:
        yield fail(f"{settings.error}; the defaults are checked instead", f"$EDITOR {settings.source}")
        return
    count = len(settings.volumes)
    text = f"{settings.source or 'the defaults'}: arena {format_bytes(settings.arena_bytes)}, {count} {'volume' if count == 1 else 'volumes'}"
    if settings.volumes or not settings.source:
        yield ok(text)
    else:
        yield warn(f"{text}: blocks do not outlive the arena", f"add a [[volume]] to {settings.source}")


def check_runtime_dir(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the sockets' directory is there, or can be made, and is nobody else's."""
    name = machine.settings.runtime_dir
    path = system.path(name)
    if path.is_dir():
        try:
            refuse_foreign_dir(path)
        except NotAllowed as error:
            yield fail(str(error), f"chmod o-w {name}   # or daemon.runtime_dir elsewhere")
            return
        status = path.stat()
        if os.access(path, os.W_OK | os.X_OK):
            yield ok(f"{name}, uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}")
        else:
            yield fail(f"{name} belongs to uid {status.st_uid}; uid {os.geteuid()} may not write to it", f"chown {os.geteuid()} {name}   # or run as its owner")
        return
    if os.path.lexists(path):
        yield fail(f"{name} is no directory", f"rm {name}")
        return
    above = PurePosixPath(name).parent
    while not system.exists(str(above)) and above != above.parent:
        above = above.parent
    if os.access(system.path(str(above)), os.W_OK | os.X_OK):
        yield ok(f"{name} will be made")
    else:
        yield fail(f"{name} is not there, and uid {os.geteuid()} may not make it in {above}", f"install -d -m 0750 -o {os.geteuid()} {name}")


def check_lock(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether a daemon owns the runtime directory."""
    directory = machine.settings.runtime_dir
    try:
        owner = lock_owner(system, directory)
    except OSError as error:
        yield warn(f"{directory}/{LOCK_FILE} can't be read: {error.strerror}", "run as root or as the daemon's user")
        return
    if owner is not None:
        yield ok(f"a daemon runs here, pid {owner}")
    elif _listens(str(system.path(f"{directory}/{GRPC_SOCKET}"))):
        yield ok("a daemon runs here, in another PID namespace")
    else:
        yield ok("free: no daemon runs there")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(path)
        except OSError:
            return False
        return True
