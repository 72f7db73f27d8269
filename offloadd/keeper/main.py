"""The keeper process: `python -m offloadd.keeper.main --fd N`, N being its end of a SEQPACKET socket to the front."""

import argparse
import ctypes
import os
import signal
import socket
import traceback

from offloadd.ipc.channel import Channel
from offloadd.keeper.messages import Request
from offloadd.keeper.service import Keeper

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: a keeper without a front would hold the volume's lock for nobody."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main() -> None:
    """Serve until the front closes the socket or the volume."""
    parser = argparse.ArgumentParser(prog="offloadd-keeper", description="Keeps one volume for an offloadd front; started by the front.")
    parser.add_argument("--fd", type=int, required=True, help="inherited descriptor of the SEQPACKET socket")
    arguments = parser.parse_args()
    die_with_parent()
    # Ctrl-C reaches the whole process group; the front decides what becomes of its volumes, and closes them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=arguments.fd)
    sock.setblocking(True)
    sock.set_inheritable(False)
    status = 0
    try:
        Keeper(Channel(sock, Request)).run()
    except BaseException:
        traceback.print_exc()
        status = 1
    # Not by way of the interpreter's end, which would wait for threads that a hung volume may hold for minutes.
    os._exit(status)


if __name__ == "__main__":
    main()
