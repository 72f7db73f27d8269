"""Container checks: what a container hides or limits so that GPU paths fail without saying why."""

from collections.abc import Iterator

from offloadd.doctor import nvidia
from offloadd.doctor.checks.gpu import NO_GPU
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.subject import Machine
from offloadd.machine.mounts import mount_of
from offloadd.machine.system import System
from offloadd.memory.topology import read_topology
from offloadd.units import MIB, format_bytes

#: linux/capability.h
CAP_IPC_LOCK = 14
CAP_SYS_NICE = 23
#: What container runtimes give a container that shares nothing.
_PRIVATE_SHM_BYTES = 64 * MIB


def check_udev(system: System, machine: Machine) -> Iterator[Finding]:
    """cuFile asks udev's database what lies behind a file."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
    elif system.exists("/run/udev"):
        yield ok("/run/udev is there: cuFile can tell what a file lies on")
    else:
        yield warn("/run/udev is missing: cuFile and KvikIO take compat mode for every file", "docker run -v /run/udev:/run/udev:ro ...")


def check_modules_file(system: System, machine: Machine) -> Iterator[Finding]:
    """libcufile looks for nvidia_fs in /proc/modules."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
    elif system.modules() is None:
        # Measured: with compat mode OFF the real libcufile spins for ever then.
        yield fail(
            "/proc/modules can't be read: libcufile spins for ever when compat mode is off", "run in a container that sees /proc/modules (runc, not a sandbox)"
        )
    else:
        yield ok("/proc/modules can be read")


def check_shm(system: System, machine: Machine) -> Iterator[Finding]:
    """CUDA's interprocess events live in /dev/shm."""
    mount = mount_of(system, "/dev/shm")
    if mount is None or mount.point != "/dev/shm":
        cause = "/dev/shm is no file system of its own"
        yield warn(f"{cause}: CUDA events can't pass between processes", "mount -t tmpfs tmpfs /dev/shm") if nvidia.driver(system) else not_applicable(cause)
        return
    size = _shm_bytes(mount.option("size"))
    if not system.in_container():
        yield ok(f"one /dev/shm for all processes{f', {format_bytes(size)}' if size else ''}")
    elif size == _PRIVATE_SHM_BYTES:
        yield warn(
            f"/dev/shm has {format_bytes(size)}, as containers get that share nothing: engines in other containers can't order copies by CUDA events",
            "docker run --ipc=host ...   # Kubernetes: one emptyDir (medium: Memory) at /dev/shm of both",
        )
    else:
        yield ok("/dev/shm; engines in other containers must have the same one")


def check_seccomp(system: System, machine: Machine) -> Iterator[Finding]:
    """Container runtimes' filters refuse to place memory on NUMA nodes unless CAP_SYS_NICE is given. Threads may be bound all the same."""
    nodes = len(read_topology(system.root).nodes)
    if system.status("Seccomp") in ("", "0"):
        yield ok("no system call filter on this process")
    elif system.in_container() and nodes > 1 and not system.has_capability(CAP_SYS_NICE):
        yield warn(
            f"a system call filter without CAP_SYS_NICE, {nodes} NUMA nodes: the arena can't be spread over them, and lies where it is touched first",
            "docker run --cap-add SYS_NICE ...",
        )
    else:
        yield ok("a system call filter is on; nothing that offloadd calls is known to be refused")


def _shm_bytes(text: str | None) -> int:
    if not text:
        return 0
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1].lower(), 1)
    digits = text.rstrip("kKmMgG")
    return int(digits) * unit if digits.isdigit() else 0
