"""Setting cuFile up either works or says why not, in time."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ...standin.controls import Control, wait_until
from ...standin_tests.child import Child

CONFIGURE = "result = unavailable(lambda: configure(device, task_bytes=SLOT_BYTES, threads=4, proc=Path(PROC), timeout_s={timeout_s}))"


def test_kvikio_is_set_to_bounce_nothing(mover: Child) -> None:
    told = mover.run("""
        import kvikio, kvikio.defaults
        get = kvikio.defaults.get
        result = [get("compat_mode") == kvikio.CompatMode.OFF, get("gds_threshold"), get("task_size"), get("num_threads")]
    """)
    assert told == [True, 0, 1 << 20, 4]


@pytest.mark.parametrize(("task_bytes", "threads"), [(4095, 1), (0, 1), ((16 << 20) + 4096, 1), (4096, 0)])
def test_sizes_that_can_not_be_are_refused(make_mover: Callable[[], Child], task_bytes: int, threads: int) -> None:
    told = make_mover().run(f"result = failure(lambda: configure(device, task_bytes={task_bytes}, threads={threads}))")
    assert told[0] == "ValueError" and str(task_bytes if threads else threads) in told[2]


def test_without_proc_modules_the_driver_is_not_opened(make_mover: Callable[[], Child], control: Control, tmp_path: Path) -> None:
    mover = make_mover()
    (tmp_path / "machine" / "proc" / "modules").unlink()
    told = mover.run(CONFIGURE.format(timeout_s=60))
    assert told[0] == "driver" and "/modules is missing" in told[1]
    assert "cuFileDriverOpen" not in control.process(mover.pid).calls


def test_a_driver_that_does_not_open_says_why(make_mover: Callable[[], Child], control: Control) -> None:
    control.fail("cuFileDriverOpen", 5001)
    told = make_mover().run(CONFIGURE.format(timeout_s=60))
    assert told[0] == "driver" and "nvidia-fs driver is not loaded" in told[1] and "/kvikio/" not in told[1]


def test_a_driver_that_hangs_while_it_is_opened_is_given_up_and_the_process_goes_on(make_mover: Callable[[], Child], control: Control) -> None:
    mover = make_mover()
    with control.hang("cuFileDriverOpen") as fault:
        told = mover.run(CONFIGURE.format(timeout_s=0.2))
        assert told[0] == "timeout" and "0.2 s" in told[1]
        wait_until(lambda: fault.waiting_now == 1, "the driver to hang")
        assert mover.run("result = device.free_bytes() > 0") is True


def test_without_statistics_nothing_can_be_proved_so_it_is_refused(make_mover: Callable[[], Child], control: Control) -> None:
    control.fail("cuFileStatsStart", 5030)
    told = make_mover().run(CONFIGURE.format(timeout_s=60))
    assert told[0] == "unproven" and "cuFileStatsStart" in told[1]


def test_a_kvikio_without_a_summary_is_refused(make_mover: Callable[[], Child]) -> None:
    mover = make_mover()
    mover.run("import kvikio; del kvikio.SummaryMonitor")
    told = mover.run(CONFIGURE.format(timeout_s=60))
    assert told[0] == "unproven" and "SummaryMonitor" in told[1]


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        ("sys.modules['kvikio'] = None", "no_kvikio", "cuda13"),
        ("sys.meta_path.insert(0, Broken())", "no_cufile", "libcufile.so.0"),
    ],
)
def test_without_kvikio_or_the_library_that_it_loads_that_is_named(code: str, reason: str, text: str) -> None:
    program = f"""
import sys
class Broken:
    def find_spec(self, name, path, target=None):
        if name == "kvikio":
            raise OSError("libcufile.so.0: cannot open shared object file")
{code}
from offloadd.cuda.gds_setup import GdsUnavailable, configure
try:
    configure(None, task_bytes=4096, threads=1)
except GdsUnavailable as error:
    print(error.reason, error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.startswith(reason + " ") and text in told


@pytest.mark.parametrize(
    ("arrange", "reason", "text"),
    [
        (lambda control: control.fail("cuFileHandleRegister", 5008), "file_system", "not supported on current file"),
        (lambda control: control.fail("cuFileHandleRegister", 5001), "driver", "nvidia-fs driver is not loaded"),
    ],
)
def test_a_volume_that_cufile_refuses_says_why(mover: Child, control: Control, arrange: Callable[[Control], object], reason: str, text: str) -> None:
    mover.run("volume.close()")
    arrange(control)
    told = mover.run("result = unavailable(lambda: GdsVolume.open(gds, data_fd, synced_fd))")
    assert told[0] == reason and text in told[1]


def test_a_file_that_may_not_be_written_says_so(mover: Child) -> None:
    told = mover.run("""
        read_only = os.open(PATH, os.O_RDONLY)
        os.chmod(PATH, 0o444)
        if os.getuid() == 0:  # whom no mode keeps out
            os.setgid(65534); os.setuid(65534)
        result = unavailable(lambda: GdsVolume.open(gds, read_only, synced_fd))
    """)
    assert told[0] == "permission" and "Permission denied" in told[1]


def test_a_folder_is_no_volume(mover: Child) -> None:
    told = mover.run("result = unavailable(lambda: GdsVolume.open(gds, os.open(os.path.dirname(PATH), os.O_RDONLY), synced_fd))")
    assert told[0] == "io_error" and "Is a directory" in told[1]
