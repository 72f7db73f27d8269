"""What is left of a process that was killed: threads that wait in the kernel for a device (D state) outlive SIGKILL until the device answers."""

from enum import Enum

from offloadd.machine.system import System

_SIGKILL_BIT = 1 << 8
#: States (proc_pid_status(5)) of a thread that has ended.
_ENDED = ("Z", "X", "x")


class Left(Enum):
    """Of a process that may have been killed.

    RUNNING: it may execute code of its own. IN_KERNEL: it was killed, and every thread that has not ended waits in the kernel; from there it ends without
    another instruction of its own, so that its memory changes by the system calls that are under way and by nothing else. NOTHING: it has ended.
    """

    RUNNING = "running"
    IN_KERNEL = "in the kernel"
    NOTHING = "nothing"


def left_of(pid: int, system: System | None = None) -> Left:
    """What is left of a child that was not waited for yet, so that the number is still its own.

    Not each thread is looked at in the same instant, and need not be: one that was killed makes no other, and one that was not shows.
    """
    system = system or System()
    states = []
    tasks = system.names(f"/proc/{pid}/task")
    if not tasks and not system.exists("/proc/self/status"):
        # Where /proc tells nothing, nothing may be concluded.
        return Left.RUNNING
    for task in tasks:
        state = system.status("State", f"{pid}/task/{task}")[:1]
        if state in _ENDED or (not state and not system.exists(f"/proc/{pid}/task/{task}")):
            continue
        # Only of a thread that waits is it certain that it is not in the middle of a copy.
        if state != "D" or not int(system.status("SigPnd", f"{pid}/task/{task}") or "0", 16) & _SIGKILL_BIT:
            return Left.RUNNING
        states.append(state)
    return Left.IN_KERNEL if states else Left.NOTHING
