"""KvikIO and cuFile, set up for one GPU, or the reason why they can't be."""

import enum
import errno
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from offloadd.cuda.cufile_stats import Proof, StatsUnavailable
from offloadd.cuda.device import Device
from offloadd.units import MIB, SECTOR_BYTES

#: nvidia-fs keeps a shadow buffer of at most this size for a registration; a larger one would be served in pieces.
SLOT_BYTES_MAX = 16 * MIB
#: Opening the driver of cuFile takes well under a second where it works.
OPEN_TIMEOUT_S = 30.0

_PLACE_IN_SOURCE = re.compile(r"(?:KvikIO failure at|cuFile error at|CUDA error at|Linux system/library function call error at): \S+:\d+: ")
_T = TypeVar("_T")


class WhyNot(enum.StrEnum):
    """Why GPUDirect Storage can't be used."""

    NO_KVIKIO = "no_kvikio"
    NO_CUFILE = "no_cufile"
    DRIVER = "driver"
    FILE_SYSTEM = "file_system"
    REGISTRATION = "registration"
    PERMISSION = "permission"
    UDEV = "udev"
    P2PDMA = "p2pdma"
    CUDA = "cuda"
    IO_ERROR = "io_error"
    WRONG_BYTES = "wrong_bytes"
    TIMEOUT = "timeout"
    BOUNCED = "bounced"
    UNPROVEN = "unproven"


class GdsUnavailable(OSError):
    """GPUDirect Storage can't be used, here or for this volume. An OSError, as all that keeps bytes from moving is."""

    def __init__(self, reason: WhyNot, why: str) -> None:
        super().__init__(errno.EOPNOTSUPP, why)
        self.reason = reason
        self.why = why

    def __str__(self) -> str:
        return self.why


class Gds:
    """KvikIO and cuFile, set up for one device. Made once in a process, by `configure`."""

    def __init__(self, device: Device, proof: Proof, task_bytes: int) -> None:
        """See `configure`."""
        self.device = device
        self.proof = proof
        self.task_bytes = task_bytes

    def close(self) -> None:
        """Close the driver of cuFile. Slots and volumes must be closed before."""
        import kvikio.cufile_driver

        self.device.make_current()
        self.proof.close()
        kvikio.cufile_driver.driver_close()


def configure(device: Device, *, task_bytes: int, threads: int, timeout_s: float = OPEN_TIMEOUT_S, proc: Path = Path("/proc")) -> Gds:
    """Set KvikIO up and open the driver of cuFile; once in a process, before any other use of KvikIO, and never before a fork.

    `task_bytes`: the longest slice, so that each is exactly one call of cuFile. `threads`: KvikIO has one pool for all volumes and an I/O holds a thread of it
    until it ends, hung ones for ever; so it must be at least the number of I/Os in flight at once over all volumes, and one more for each probe. `proc`: where
    procfs is mounted. Raises ValueError for sizes that can't be, GdsUnavailable otherwise, after `timeout_s` at the latest (then a thread of this process may
    never end, and this must not be called again).
    """
    if task_bytes % SECTOR_BYTES or not SECTOR_BYTES <= task_bytes <= SLOT_BYTES_MAX:
        raise ValueError(f"task_bytes {task_bytes} is not a multiple of {SECTOR_BYTES} up to {SLOT_BYTES_MAX}")
    if threads < 1:
        raise ValueError(f"threads {threads} is below 1")
    kvikio = _import_kvikio()
    if not (proc / "modules").exists():
        # libcufile 1.20 looks for it again and again, on a core of its own, in cuFileDriverOpen.
        raise GdsUnavailable(
            WhyNot.DRIVER, f"{proc}/modules is missing, and cuFile would wait for it for ever: this kernel or container does not tell its modules"
        )
    kvikio.defaults.set(
        {
            # AUTO falls back to host memory without a word, file by file.
            "compat_mode": kvikio.CompatMode.OFF,
            # Below it (16 KiB by default) KvikIO bounces reads and writes itself, even with compat mode OFF.
            "gds_threshold": 0,
            "task_size": task_bytes,
            "num_threads": threads,
        }
    )

    def open_driver() -> Proof:
        device.make_current()
        try:
            kvikio.cufile_driver.driver_open()
        except RuntimeError as error:
            text = text_of(error)
            raise GdsUnavailable(WhyNot.NO_CUFILE if "libcufile" in text else WhyNot.DRIVER, f"open the driver of cuFile: {text}") from error
        try:
            return Proof.start()
        except StatsUnavailable as error:
            kvikio.cufile_driver.driver_close()
            raise GdsUnavailable(WhyNot.UNPROVEN, str(error)) from error

    return Gds(device, within(timeout_s, open_driver, "open the driver of cuFile"), task_bytes)


def _import_kvikio() -> Any:
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        # The wheel of KvikIO loads libcufile while it is imported, where cuda-pathfinder is installed.
        reason = WhyNot.NO_CUFILE if "cufile" in str(error) else WhyNot.NO_KVIKIO
        raise GdsUnavailable(reason, f"KvikIO can't be imported ({error}); install offloadd with its extra cuda12 or cuda13") from error
    return kvikio


def within(timeout_s: float, work: Callable[[], _T], what: str) -> _T:
    """What `work` gives, done in a daemon thread: a call into cuFile can't be stopped, only left alone. Raises GdsUnavailable after `timeout_s`."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"gds: {what}", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            return future.result()
        raise GdsUnavailable(WhyNot.TIMEOUT, f"{what}: not done within {timeout_s:g} s") from None


def text_of(error: BaseException) -> str:
    """What KvikIO says, without the place in its source."""
    return _PLACE_IN_SOURCE.sub("", str(error))
