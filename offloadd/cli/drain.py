"""`offloadd drain`: has a running daemon end without losing what it was asked to keep."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from offloadd.cli.status import EXIT_NO_DAEMON
from offloadd.doctor.owner import lock_owner
from offloadd.errors import Unavailable
from offloadd.machine.system import System
from offloadd.model.runtime import ADMIN_SOCKET, runtime_dir_default

#: Exit status when the daemon has not ended in time; it goes on ending.
EXIT_TIMEOUT = 4
_LOOK_S = 0.1


def drain(
    runtime_dir: Annotated[Path | None, typer.Option("--runtime-dir", metavar="DIR", help="Runtime directory of the daemon.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, max=3600.0, metavar="SECONDS", help="How long to wait for its end.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Have the daemon refuse new requests, answer those that run, spill kept blocks to volumes, and exit.

    Exit status 3: no daemon is running; 4: it has not ended within --timeout seconds, and goes on ending.
    """
    from offloadd.client import AdminClient
    from offloadd.errors import DeadlineExpired

    directory = runtime_dir if runtime_dir is not None else runtime_dir_default()
    end_s = time.monotonic() + timeout
    try:
        with AdminClient(directory) as admin:
            held = admin.status().held_count
            if not as_json:
                print(f"draining the daemon at {directory}: {held} kept blocks", flush=True)
            spilled = admin.drain(timeout_s=timeout)
    except Unavailable:
        print(f"no daemon is running at {directory}", file=sys.stderr)
        raise typer.Exit(EXIT_NO_DAEMON) from None
    except DeadlineExpired:
        _not_in_time(timeout)
    # Until another daemon may start: the volumes are closed, and the directory is given up.
    while (directory / ADMIN_SOCKET).exists() or lock_owner(System(), str(directory)) is not None:
        if time.monotonic() >= end_s:
            _not_in_time(timeout)
        time.sleep(_LOOK_S)
    print(json.dumps({"spilled_count": spilled}) if as_json else f"drained: {spilled} blocks were spilled to volumes; the daemon has ended")


def _not_in_time(timeout_s: float) -> None:
    print(f"the daemon has not ended within {timeout_s:.0f} s; it goes on ending (offloadd status shows what it does)", file=sys.stderr)
    raise typer.Exit(EXIT_TIMEOUT)
