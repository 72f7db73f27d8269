"""A probe tells whether and how a volume can be reached, harms nothing, and ends in time."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ...doctor.tree import Tree
from ...standin.block import CufileMode
from ...standin.controls import Control, wait_until
from ...standin_tests.child import Child
from .conftest import SLOT

PROBE = """
result = told(probe(gds, data_fd, synced_fd, slot_bytes=SLOT_BYTES, file_offset={offset}, writes={writes}, timeout_s={timeout_s}, system=System(Path(MACHINE))))
"""


def probe(mover: Child, *, offset: int = 2 * SLOT, writes: bool = True, timeout_s: float = 60) -> tuple[bool, str, str | None, str]:
    return tuple(mover.run(PROBE.format(offset=offset, writes=writes, timeout_s=timeout_s)))


def begin_probe(mover: Child, *, writes: bool = True, timeout_s: float = 60) -> None:
    mover.start(PROBE.format(offset=2 * SLOT, writes=writes, timeout_s=timeout_s))


@pytest.mark.parametrize(("mode", "way"), [(CufileMode.NVFS, "gds_nvfs"), (CufileMode.P2P, "gds_p2p")])
def test_a_volume_that_works_is_told_with_its_way_and_only_scratch_is_written(mover: Child, control: Control, path: Path, mode: CufileMode, way: str) -> None:
    control.cufile_mode = mode
    old, process = path.read_bytes(), control.process(mover.pid)
    before = process.counters
    assert probe(mover) == (True, way, None, "")
    new = path.read_bytes()
    assert (new[: 2 * SLOT], new[3 * SLOT :]) == (old[: 2 * SLOT], old[3 * SLOT :]) and new != old
    moved = process.counters - before
    assert (moved.cufile_reads, moved.cufile_writes, moved.cufile_host_copies, moved.cufile_bounced) == (1, 1, 0, 0)
    # It leaves what it found: the fixture's own slot and volume.
    assert process.counters.held == before.held


def test_a_probe_without_scratch_only_reads(mover: Child, control: Control, path: Path) -> None:
    old = path.read_bytes()
    assert probe(mover, writes=False) == (True, "gds_nvfs", None, "")
    assert path.read_bytes() == old
    assert control.process(mover.pid).counters.cufile_writes == 0


@pytest.mark.parametrize("writes", [False, True])
def test_compatibility_mode_is_told_as_bounced(mover: Child, control: Control, writes: bool) -> None:
    control.cufile_mode = CufileMode.COMPAT
    available, way, reason, why = probe(mover, writes=writes)
    assert (available, way, reason) == (False, "cufile_posix", "bounced")
    assert "cuFile bounced through POSIX" in why


def test_what_kvikio_moves_by_itself_is_told_as_bounced(mover: Child) -> None:
    mover.run("""
        import kvikio, offloadd.cuda.probe
        real = offloadd.cuda.probe.GdsVolume.open
        def then_spoil(*arguments):
            opened = real(*arguments)
            kvikio.defaults.set("gds_threshold", 16 << 20)
            return opened
        offloadd.cuda.probe.GdsVolume.open = then_spoil
    """)
    assert probe(mover)[:3] == (False, "kvikio_posix", "bounced")


@pytest.mark.parametrize(
    ("arrange", "reason", "text"),
    [
        (lambda control: control.fail("cuFileHandleRegister", 5008), "file_system", "not supported on current file"),
        (lambda control: control.limit_bar(SLOT), "registration", "pinned"),
        (lambda control: control.fail("cuMemAlloc", 2), "cuda", "OUT_OF_MEMORY"),
        (lambda control: control.fail("cuFileWrite", errno.ENOSPC), "io_error", "No space left on device"),
        (lambda control: control.fail("cuFileWrite", errno.EACCES), "permission", "Permission denied"),
        (lambda control: control.fail("cuFileRead", errno.EIO), "io_error", "cuFile gave an error"),
        (lambda control: control.short("cuFileRead", 4096), "io_error", "cuFile moved 4096"),
        (lambda control: control.fail("cuFileGetStatsL3", 5022, skip=1), "unproven", "cuFileGetStatsL3"),
    ],
)
def test_what_stands_in_the_way_is_told_and_nothing_leaks(mover: Child, control: Control, arrange: Callable[[Control], object], reason: str, text: str) -> None:
    process = control.process(mover.pid)
    held = process.counters.held
    arrange(control)
    told = probe(mover)
    assert (told[0], told[2]) == (False, reason) and text in told[3], told
    control.reset()
    assert process.counters.held == held
    assert probe(mover)[0] is True


def test_io_that_is_not_counted_is_unproven(mover: Child) -> None:
    mover.run("gds.proof._stats.stop()")
    told = probe(mover)
    assert (told[0], told[1], told[2]) == (False, "", "unproven") and "cuFile counted 0 and 0" in told[3]


def test_right_bytes_that_cufile_did_not_move_prove_nothing(mover: Child) -> None:
    mover.run("""
        import mmap
        def by_the_host(self, slot, at, size, offset):
            with mmap.mmap(-1, size) as pages:  # aligned, as O_DIRECT wants
                pages[:] = read(slot.address + at, size)
                return os.pwrite(data_fd, pages, offset)
        GdsVolume.write = by_the_host
    """)
    told = probe(mover)
    assert (told[0], told[2]) == (False, "unproven") and "cuFile counted 1 and 0" in told[3]


@pytest.mark.parametrize(("victim", "by"), [("cuFileWrite", "cuFile"), ("cuFileRead", "a plain read")])
def test_bytes_that_come_back_wrong_are_seen(mover: Child, victim: str, by: str) -> None:
    # A write that goes to another place comes back right to the reader that goes there too.
    both = victim == "cuFileRead"
    mover.run(f"""
        real_read, real_write = GdsVolume.read, GdsVolume.write
        GdsVolume.write = lambda self, slot, at, size, offset: real_write(self, slot, at, size, offset + SLOT_BYTES)
        if {both}:
            GdsVolume.read = lambda self, slot, at, size, offset: real_read(self, slot, at, size, offset + SLOT_BYTES)
    """)
    available, _, reason, why = probe(mover)
    assert (available, reason) == (False, "wrong_bytes") and f"by {by}" in why


def test_a_read_that_moves_nothing_is_not_taken_for_what_was_written(mover: Child) -> None:
    mover.run("GdsVolume.read = lambda self, slot, at, size, offset: size")
    assert probe(mover)[2] == "wrong_bytes"


@pytest.mark.parametrize("function", ["cuFileWrite", "cuFileRead", "cuFileHandleRegister", "cuFileBufRegister"])
def test_incident_17_a_probe_that_hangs_is_given_up_and_the_process_goes_on(mover: Child, control: Control, function: str) -> None:
    process = control.process(mover.pid)
    held = process.counters.held
    with control.hang(function, times=1) as fault:
        begin_probe(mover, timeout_s=0.2)
        told = mover.finish()
        assert told[:3] == [False, "", "timeout"] and "0.2 s" in told[3]
        wait_until(lambda: fault.waiting_now == 1, "the probe to hang")
        assert mover.run("result = volume.read(slot, 0, SLOT_BYTES, 0)") == SLOT
        assert probe(mover, writes=False)[0] is True
        # Numbers of closed descriptors may be given to other files; the probe has its own.
        mover.run("os.close(data_fd)")
        calls = process.calls
    # When the hung call comes back, the probe begins nothing new and gives back all that it held.
    wait_until(lambda: process.counters.held == held, "the probe to give back what it held")
    for later in {"cuFileWrite": ("cuFileRead",), "cuFileRead": ()}.get(function, ("cuFileRead", "cuFileWrite")):
        assert process.calls.get(later, 0) == calls.get(later, 0)


@pytest.mark.parametrize(
    ("arrange", "hint"), [(lambda control: setattr(control, "cufile_mode", CufileMode.COMPAT), True), (lambda control: control.limit_bar(SLOT), False)]
)
def test_missing_udev_is_named_where_it_may_be_the_cause(
    mover: Child, control: Control, machine: Tree, arrange: Callable[[Control], object], hint: bool
) -> None:
    machine.remove("/run/udev")
    assert probe(mover)[0] is True
    arrange(control)
    told = probe(mover)
    assert (told[2] == "udev", "run/udev can't be read" in told[3]) == (hint, hint)


def number_under(path: Path, machine: Tree) -> str:
    """That of the disk which the volume really lies on; free in the tree, whose virtual disk may have it."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (machine.root / "sys/dev/block" / number).unlink(missing_ok=True)
    return number


def test_nvme_over_fabrics_without_nvidia_fs_is_named_as_doctor_names_it(mover: Child, control: Control, machine: Tree, path: Path) -> None:
    machine.fabric_nvme("rdma", "live", number=number_under(path, machine))
    control.cufile_mode = CufileMode.COMPAT
    told = probe(mover)
    assert (told[:3], told[3].partition(":")[0]) == ((False, "cufile_posix", "p2pdma"), "nvidia-fs is not loaded; P2PDMA mode does not know NVMe-oF")
    assert "cuFile bounced through POSIX" in told[3]
    machine.nvidia_fs("nvme")
    assert "nvidia-fs has not hooked nvme_rdma; P2PDMA mode does not know NVMe-oF" in probe(mover)[3]
    # With the hook, something else must be why; and a volume that works is not refused for what its machine looks like.
    machine.nvidia_fs("nvme_rdma")
    assert probe(mover)[2] == "bounced"
    control.cufile_mode = CufileMode.NVFS
    assert probe(mover)[0] is True


def test_a_local_drive_without_nvidia_fs_is_not_taken_for_a_fabric(mover: Child, control: Control, machine: Tree, path: Path) -> None:
    machine.local_nvme(number=number_under(path, machine))
    control.cufile_mode = CufileMode.COMPAT
    assert probe(mover)[2] == "bounced"


def test_a_failed_configuration_is_a_result_for_every_volume(make_mover: Callable[[], Child], control: Control) -> None:
    control.fail("cuFileDriverOpen", 5001)
    told = make_mover().run("""
        try:
            configure(device, task_bytes=SLOT_BYTES, threads=1, proc=Path(PROC))
        except GdsUnavailable as error:
            result = told(ProbeResult.refused(error))
    """)
    assert told[:3] == [False, "", "driver"] and "nvidia-fs" in told[3]
