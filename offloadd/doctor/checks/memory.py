"""Memory checks: whether the arena and the staging slots fit, can be page-locked, and lie on huge pages; and limits of descriptors and sockets."""

from collections.abc import Iterator

from offloadd.doctor import nvidia
from offloadd.doctor.checks.container import CAP_IPC_LOCK
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.owner import lock_owner
from offloadd.doctor.subject import Machine
from offloadd.ipc.channel import MESSAGE_BYTES_MAX
from offloadd.machine.system import System
from offloadd.transfer import native
from offloadd.units import KIB, MIB, format_bytes

_HUGE_PAGE_BYTES = 2 * MIB
_HUGE_PAGES = "/sys/kernel/mm/hugepages/hugepages-2048kB"
#: Descriptors of the front besides clients' memories: gRPC, sockets to workers, the arena.
_OWN_FILES = 256
#: Of one session: its attach socket and its pidfd. Its gRPC connection has a limit of its own.
_SESSION_FILES = 2


def mover_count(system: System) -> int:
    """One mover for host memory and one a GPU."""
    return 1 + nvidia.gpu_count(system)


def check_free(system: System, machine: Machine) -> Iterator[Finding]:
    """Arena, staging slots and index against the memory of the machine and of the control group."""
    settings = machine.settings
    staging = settings.staging_bytes(mover_count(system))
    need = settings.arena_bytes + staging + settings.index_bytes_max
    index = format_bytes(settings.index_bytes_max)
    parts = f"{format_bytes(need)} (arena {format_bytes(settings.arena_bytes)}, staging {format_bytes(staging)}, index up to {index})"
    total, available, limit = _meminfo(system, "MemTotal"), _meminfo(system, "MemAvailable"), cgroup_memory_bytes(system)
    if limit is not None and need > limit:
        yield fail(f"the control group allows {format_bytes(limit)}; needed: {parts}", "raise memory.max (docker run --memory), or set a smaller arena_bytes")
    elif need > total:
        yield fail(f"the machine has {format_bytes(total)}; needed: {parts}", "set a smaller arena_bytes")
    elif need > available:
        yield warn(f"{format_bytes(available)} are available; needed: {parts}, unless a daemon holds them already", "set a smaller arena_bytes")
    else:
        yield ok(f"{format_bytes(available)} available; needed: {parts}")


def check_memlock(system: System, machine: Machine) -> Iterator[Finding]:
    """CUDA and RDMA registration page-lock the arena and the staging slots."""
    process, whose = _process(system, machine)
    limit = system.limit("Max locked memory", process)
    need = machine.settings.arena_bytes + machine.settings.staging_bytes(mover_count(system))
    if limit is None or system.has_capability(CAP_IPC_LOCK, process):
        yield ok(f"no limit for {whose}")
    elif limit >= need:
        yield ok(f"{format_bytes(limit)} for {whose}; arena and staging are {format_bytes(need)}")
    elif nvidia.driver(system) is None:
        yield not_applicable(f"{format_bytes(limit)} for {whose}; nothing is page-locked without a GPU")
    else:
        yield warn(
            f"{format_bytes(limit)} may be page-locked by {whose}; arena and staging are {format_bytes(need)}: copies would pass pageable memory",
            "ulimit -l unlimited   # systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1",
        )


def check_huge_pages(system: System, machine: Machine) -> Iterator[Finding]:
    """Reserved pages for the arena, or at least transparent huge ones for shared memory."""
    settings = machine.settings
    if settings.arena_bytes == 0 or settings.huge_pages == "never":
        yield not_applicable("the configuration asks for none")
        return
    need = -(-settings.arena_bytes // _HUGE_PAGE_BYTES)
    total, free = (system.number(f"{_HUGE_PAGES}/{name}") or 0 for name in ("nr_hugepages", "free_hugepages"))
    reserve = f"sysctl -w vm.nr_hugepages={total - free + need}"
    if free >= need:
        yield ok(f"{free} reserved pages of 2 MiB are free; the arena takes {need}")
        return
    if settings.huge_pages == "require":
        text = f"{free} of {total} reserved pages of 2 MiB are free; the arena takes {need}"
        # A running daemon holds its pages: then they are taken and all is well.
        yield fail(f'{text}; arena.huge_pages is "require"', reserve) if total < need else warn(f"{text}, unless a daemon holds them already", reserve)
        return
    policy = _chosen(system.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if policy in ("always", "within_size", "advise", "force"):
        yield ok(f"transparent huge pages for shared memory: {policy}")
    else:
        yield warn(
            f"{free} reserved pages free, the arena takes {need}; shmem_enabled is {policy or 'missing'}: the arena lies on pages of 4 KiB",
            f"{reserve}   # or: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )


def check_files(system: System, machine: Machine) -> Iterator[Finding]:
    """Descriptors of the daemon: half of them are for memories of clients, which are refused beyond it, the other half for sockets, volumes and itself."""
    process, whose = _process(system, machine)
    # The daemon raises its own limit as far as it may.
    settings, limit = machine.settings, system.limit("Max open files", process, hard=True)
    memories = settings.memories_per_session_max
    need = 2 * max(memories, settings.sessions_max * _SESSION_FILES + settings.connections_max + 4 * len(settings.volumes) + _OWN_FILES)
    if limit is None:
        yield ok(f"no limit for {whose}")
    elif limit >= need:
        yield ok(f"{limit} for {whose}: room for {limit // 2} memories of engines, {memories} at most of each session")
    else:
        yield warn(
            f"{limit} for {whose}; {settings.sessions_max} sessions, {memories} memories of one, and {settings.connections_max} connections need {need}",
            f"ulimit -Hn {need}   # systemd: LimitNOFILE={need}",
        )


def check_sockets(system: System, machine: Machine) -> Iterator[Finding]:
    """Messages between the daemon's processes are single packets: the kernel refuses one that is longer than the send buffer may be."""
    limit = system.number("/proc/sys/net/core/wmem_max")
    if limit is None:
        yield not_applicable("net.core.wmem_max can't be read")
    elif 2 * limit < MESSAGE_BYTES_MAX + KIB:
        # The kernel grants twice the limit and keeps some bytes for itself; a packet that is longer than that is refused for good.
        yield fail(
            f"net.core.wmem_max is {limit}; messages of {MESSAGE_BYTES_MAX} bytes need {(MESSAGE_BYTES_MAX + KIB) // 2}", "sysctl -w net.core.wmem_max=212992"
        )
    else:
        yield ok(f"net.core.wmem_max is {format_bytes(limit)}")


def cgroup_memory_bytes(system: System) -> int | None:
    """The smallest memory limit of the control groups that this process is in; None without one."""
    limits = []
    for line in (system.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a namespace of its own the group's path starts at what is mounted; outside, every group above counts too.
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            value = system.number("/".join([base, *parts[:depth], name]))
            # Version 2 says "max" for none, version 1 a number close to 2^63, which no machine reaches.
            if value is not None:
                limits.append(value)
    return min(limits, default=None)


def check_copies(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether host memory is copied by the C library, and by which instructions."""
    try:
        library = native.load()
    except native.NativeUnavailableError as error:
        yield warn(
            f"NumPy copies host memory, at two thirds of the speed of the C library where pieces are small: {error}",
            "apt-get install gcc   # then: pip install --force-reinstall offloadd",
        )
        return
    yield ok(f"the C library, with {library.ways}")


def _process(system: System, machine: Machine) -> tuple[str, str]:
    """Whose limits count: the running daemon's, where they may be read, else those of this shell, which a service does not have."""
    owner = lock_owner(system, machine.settings.runtime_dir)
    if owner is not None and system.text(f"/proc/{owner}/limits"):
        return owner, f"the daemon, pid {owner}"
    return "self", "this shell"


def _meminfo(system: System, key: str) -> int:
    for line in (system.text("/proc/meminfo") or "").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"/proc/meminfo says nothing of {key}")


def _chosen(text: str | None) -> str:
    """The word in brackets of `always [madvise] never`."""
    return (text or "").partition("[")[2].partition("]")[0]
