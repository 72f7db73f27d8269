"""Memory, limits, and the daemon's own places."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from offloadd.daemon.lock import RuntimeDirectory
from offloadd.doctor.checks.daemon import check_lock
from offloadd.doctor.finding import Level
from offloadd.doctor.settings import VolumeSettings
from offloadd.doctor.subject import Machine
from offloadd.ipc.channel import MESSAGE_BYTES_MAX
from offloadd.machine.system import System
from offloadd.transfer import native
from offloadd.transfer.native import Library, NativeUnavailableError
from offloadd.units import GIB, MIB

from .tree import Tree, settings

SIX_THREADS = VolumeSettings(path="/mnt/kv/volume0", io_threads=6, prewrite=True)


def test_page_locking_counts_arena_and_staging_of_every_mover(tree: Tree) -> None:
    tree.nvidia(gpus=(0, 0))
    need = GIB + 6 * 8 * MIB * 3
    tree.limits(locked=str(need))
    assert tree.machine(volumes=(SIX_THREADS,)).one("memlock").level is Level.OK
    tree.limits(locked=str(need - 1))
    finding = tree.machine(volumes=(SIX_THREADS,)).one("memlock")
    assert (finding.level, "LimitMEMLOCK=infinity" in finding.mend) == (Level.WARN, True)
    tree.file("/proc/self/status", "CapEff:\t0000000000004000\nSeccomp:\t0")
    assert tree.machine(volumes=(SIX_THREADS,)).one("memlock").cause == "no limit for this shell"


def test_a_low_limit_of_page_locking_does_not_matter_without_a_gpu(tree: Tree) -> None:
    tree.limits(locked="65536")
    assert tree.machine().one("memlock").level is Level.NOT_APPLICABLE


def test_memory_is_compared_with_machine_and_control_group(tree: Tree) -> None:
    assert tree.machine().one("free").level is Level.OK
    assert tree.machine(arena_bytes=15 * GIB).one("free").level is Level.WARN
    assert tree.machine(arena_bytes=16 * GIB).one("free").level is Level.FAIL
    tree.file("/sys/fs/cgroup/memory.max", "max")
    tree.file("/sys/fs/cgroup/user.slice/memory.max", str(GIB))
    finding = tree.machine().one("free")
    assert (finding.level, finding.cause.startswith("the control group allows 1 GiB")) == (Level.FAIL, True)


def test_the_limit_of_a_version_1_control_group_counts(tree: Tree) -> None:
    tree.file("/proc/self/cgroup", "4:memory:/box\n1:cpu:/")
    tree.file("/sys/fs/cgroup/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    tree.file("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(2 * GIB))
    assert tree.machine(arena_bytes=GIB).one("free").level is Level.OK
    assert tree.machine(arena_bytes=2 * GIB).one("free").level is Level.FAIL


def reserve(tree: Tree, total: int, free: int) -> None:
    tree.file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", str(total))
    tree.file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", str(free))


@pytest.mark.parametrize(
    ("huge_pages", "total", "free", "policy", "level"),
    [
        ("auto", 512, 512, "never", Level.OK),
        ("auto", 512, 511, "never", Level.WARN),
        ("auto", 0, 0, "advise", Level.OK),
        ("require", 512, 512, "never", Level.OK),
        ("require", 512, 0, "advise", Level.WARN),
        ("require", 511, 511, "advise", Level.FAIL),
        ("never", 0, 0, "never", Level.NOT_APPLICABLE),
    ],
)
def test_huge_pages_of_an_arena_of_1_gib(tree: Tree, huge_pages: str, total: int, free: int, policy: str, level: Level) -> None:
    reserve(tree, total, free)
    tree.file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", f"always [{policy}] other")
    assert tree.machine(huge_pages=huge_pages).one("huge pages").level is level


def test_reserving_huge_pages_leaves_those_in_use_alone(tree: Tree) -> None:
    reserve(tree, 100, 40)
    tree.file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "[never]")
    assert tree.machine().one("huge pages").mend.startswith("sysctl -w vm.nr_hugepages=572 ")


def test_the_limit_of_open_files_has_a_half_for_memories_and_one_for_all_else(tree: Tree) -> None:
    tree.limits(files="1024")
    finding = tree.machine().one("open files")
    # 3 for each of 256 sessions, and 256 of its own.
    assert (finding.level, finding.mend.startswith("ulimit -Hn 2048 ")) == (Level.WARN, True)
    tree.limits(files="2048")
    assert tree.machine().one("open files").cause == "2048 for this shell: room for 1024 memories of engines, 512 at most of each session"
    assert tree.machine(memories_per_session_max=1025).one("open files").mend.startswith("ulimit -Hn 2050 ")


def test_a_send_buffer_shorter_than_a_message_fails(tree: Tree) -> None:
    # Measured on Linux 6.18: with 49152 a packet of 96 KiB is refused, with 50176 it passes.
    assert MESSAGE_BYTES_MAX == 96 * 1024
    tree.file("/proc/sys/net/core/wmem_max", "49152")
    assert tree.machine().one("sockets").level is Level.FAIL
    tree.file("/proc/sys/net/core/wmem_max", "50176")
    assert tree.machine().one("sockets").level is Level.OK


def test_a_configuration_that_is_wrong_fails_with_its_text(tree: Tree) -> None:
    finding = tree.machine(source="/etc/o.toml", error="/etc/o.toml: arena.x is unknown").one("config")
    assert (finding.level, finding.mend) == (Level.FAIL, "$EDITOR /etc/o.toml")
    assert finding.cause.startswith("/etc/o.toml: arena.x is unknown")


def test_the_runtime_directory_is_there_or_can_be_made(tree: Tree) -> None:
    assert tree.machine().one("runtime dir").cause == "/run/offloadd will be made"
    path = tree.directory("/run/offloadd")
    path.chmod(0o750)
    assert tree.machine().one("runtime dir").cause.endswith("mode 0750")
    path.chmod(0o777)
    finding = tree.machine().one("runtime dir")
    assert (finding.level, "everybody may write" in finding.cause) == (Level.FAIL, True)
    tree.remove("/run/offloadd")
    tree.file("/run/offloadd", "")
    assert tree.machine().one("runtime dir").cause == "/run/offloadd is no directory"


def lock_cause(directory: Path) -> str:
    (finding,) = check_lock(System(), Machine(settings(runtime_dir=str(directory))))
    return finding.cause


def test_the_lock_of_a_real_daemon_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert lock_cause(directory) == "free: no daemon runs there"
    owner = RuntimeDirectory(directory)
    owner.acquire()
    text = (directory / "lock").read_text().strip()
    assert lock_cause(directory) == f"a daemon runs here, pid {text}"
    owner.release()
    assert lock_cause(directory) == "free: no daemon runs there"


def test_the_limits_of_a_running_daemon_count_instead_of_the_shells(tree: Tree) -> None:
    tree.limits(files="1024")
    lock = tree.file("/run/offloadd/lock", "4711")
    tree.file("/proc/4711/limits", "Max open files            65536                65536                files     ")
    assert tree.machine().one("open files").cause.startswith("1024 for this shell")
    status = lock.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    tree.file("/proc/locks", f"1: POSIX  ADVISORY  WRITE 1 00:01:{status.st_ino} 0 EOF\n2: FLOCK  ADVISORY  WRITE 4711 {device}:{status.st_ino} 0 EOF")
    assert tree.machine().one("open files").cause == "65536 for the daemon, pid 4711: room for 32768 memories of engines, 512 at most of each session"
    tree.file("/proc/locks", f"2: FLOCK  ADVISORY  WRITE 9 ffff:01:{status.st_ino} 0 EOF")
    assert tree.machine().one("lock").cause == "free: no daemon runs there"


def test_a_daemon_in_another_pid_namespace_is_seen_by_its_socket(tmp_path: Path) -> None:
    directory = Path(os.path.relpath(tmp_path))
    (tmp_path / "lock").write_text("7\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "offloadd.sock"))
        listener.listen()
        (finding,) = check_lock(System(Path()), Machine(settings(runtime_dir=str(directory))))
    assert finding.cause == "a daemon runs here, in another PID namespace"


def test_copies_by_numpy_are_told_with_the_reason(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Library:
        raise NativeUnavailableError("it was not built: install a C compiler and then offloadd again")

    monkeypatch.setattr(native, "load", absent)
    finding = tree.machine().one("copies")
    assert finding.level is Level.WARN and "it was not built" in finding.cause and "install gcc" in finding.mend
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(ways="AVX-512"))
    assert tree.machine().one("copies").cause == "the C library, with AVX-512"
