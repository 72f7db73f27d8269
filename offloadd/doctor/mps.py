"""Whether NVIDIA's multi-process service (MPS) serves the daemon: which pipe directory its movers would use, and who is there."""

import socket
from dataclasses import dataclass
from pathlib import PurePosixPath

from offloadd.doctor.owner import lock_owner
from offloadd.machine.system import System

VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_DIRECTORY_DEFAULT = "/tmp/nvidia-mps"
_CONTROL_DAEMON = "nvidia-cuda-mps-control"
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Mps:
    """`directory`: the pipe directory; `told_by`: whose environment names it, empty if it is the default; `has_socket`: the control daemon's socket lies there;
    `answers`: somebody listens at it; `others`: process ids of control daemons that are seen to run."""

    directory: str
    told_by: str
    has_socket: bool
    answers: bool
    others: tuple[str, ...]


def mps(system: System, runtime_dir: str) -> Mps:
    """MPS as CUDA in the daemon's movers would look for it: by the running daemon's environment where that may be read, else by this shell's."""
    directory, told_by = _pipe_directory(system, runtime_dir)
    name = f"{directory}/control"
    return Mps(
        directory=directory,
        told_by=told_by,
        has_socket=system.exists(name),
        answers=_answers(str(system.path(name))),
        others=tuple(pid for pid in system.names("/proc") if pid.isdecimal() and _is_control_daemon(system, pid)),
    )


def _pipe_directory(system: System, runtime_dir: str) -> tuple[str, str]:
    try:
        owner = lock_owner(system, runtime_dir)
    except OSError:
        owner = None
    variables = system.text(f"/proc/{owner}/environ") if owner is not None else None
    if variables is not None:
        found = next((one.partition("=")[2] for one in variables.split("\0") if one.startswith(f"{VARIABLE}=")), "")
        return (found, f"the daemon, pid {owner}") if found else (_DIRECTORY_DEFAULT, "")
    found = system.environment.get(VARIABLE, "")
    return (found, "this shell") if found else (_DIRECTORY_DEFAULT, "")


def _is_control_daemon(system: System, pid: str) -> bool:
    try:
        command = system.text(f"/proc/{pid}/cmdline") or ""
    except OSError:
        # The process ended while its file was read.
        return False
    return PurePosixPath(command.partition("\0")[0]).name == _CONTROL_DAEMON


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(path)
        except OSError:
            return False
        return True
