"""Tells systemd how the service does (sd_notify, and the watchdog of its unit); does nothing when no one listens."""

import asyncio
import os
import socket

#: While the daemon stops it asks for this much more, again and again: a drain may take longer than the unit's own time, but a daemon that hangs may not.
EXTEND_S = 15.0
_EXTEND_PERIOD_S = EXTEND_S / 3


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


def watchdog_period_s() -> float | None:
    """How often the unit's watchdog is to be fed: twice in its time. None without one, or if it waits for another process."""
    try:
        time_us = int(os.environ.get("WATCHDOG_USEC", ""))
        pid = int(os.environ.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return time_us / 2e6 if time_us > 0 and pid == os.getpid() else None


async def feed_watchdog() -> None:
    """Feed it for as long as the event loop turns: a loop that hangs serves nobody, and the unit starts another daemon."""
    period_s = watchdog_period_s()
    while period_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(period_s)


async def ask_for_time() -> None:
    """Ask for more time to stop in, until cancelled."""
    while True:
        notify(f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}")
        await asyncio.sleep(_EXTEND_PERIOD_S)
