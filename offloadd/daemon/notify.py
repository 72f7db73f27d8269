"""Tells systemd how the service does (sd_notify); does nothing when no one listens."""

import os
import socket


def notify(state: str) -> None:
    """Send one state, such as `READY=1`, to $NOTIFY_SOCKET. Best effort: systemd's own time-outs cover a lost message."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(state.encode(), address)
    except OSError:
        return
