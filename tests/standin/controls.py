"""Reads counters of, and sets faults in, every process that loaded the stand-ins: through one file in shared memory, named by CUDA_STANDIN_CONTROL.

The file is made by `Control.create`. Child processes get it, and the libraries, from `environment`; this process from `load`, which must come before anything
that loads the CUDA driver.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from .block import FAULTS, MAGIC, NAME_BYTES, Action, Block, ComputeMode, Counters, CufileMode, FaultRecord, Management, ProcessRecord
from .build import Paths

EVERY_TIME = -1
#: What the management library tells of BAR1 at first.
BAR1_BYTES = 1 << 36
#: For PYTHONPATH: has the package `cupy`.
CUPY = Path(__file__).parent / "python"


def _management() -> Management:
    return Management(persistence=1, bar1_bytes=BAR1_BYTES)


class Fault(AbstractContextManager["Fault"]):
    """A fault that is set. It ends, and releases what hangs in it, with `clear` or the `with` block."""

    def __init__(self, record: FaultRecord, number: int) -> None:
        self._record = record
        self._number = number

    @property
    def calls(self) -> int:
        """Calls that it looked at, hit or not."""
        return int(self._record.calls)

    @property
    def hits(self) -> int:
        """Calls that it hit."""
        return int(self._record.hits)

    @property
    def waiting_now(self) -> int:
        """Calls that it delays or lets hang at this moment."""
        return int(self._record.waiting_now)

    def clear(self) -> None:
        """Ends it. Calls that hang in it go on, or fail with its code."""
        if self._record.active == self._number:
            self._record.active = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()


class Process:
    """The record of one process; it stays readable after the process has ended."""

    def __init__(self, record: ProcessRecord) -> None:
        self._record = record

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._record.pid)

    @property
    def counters(self) -> Counters:
        """A snapshot of its counters."""
        return Counters(*self._record.counters)

    @property
    def calls(self) -> dict[str, int]:
        """Calls by function, without the `_v2` of the newer forms; "work" counts pieces of stream work, "copy" those that copy."""
        return {function.name.decode(): function.calls for function in self._record.functions if function.name}

    def hold(self) -> None:
        """From now on no queued stream work of this process begins, until `permit` or `release`."""
        self._record.permitted = self._record.taken
        self._record.hold = 1

    def permit(self, count: int) -> None:
        """Lets that many more pieces of held work run, each when its turn in its stream has come."""
        self._record.permitted += count

    def release(self) -> None:
        """Ends `hold`."""
        self._record.hold = 0


class Control:
    """The control block of a set of processes that use the stand-ins as if they shared a machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(Block))
        self._block = Block.from_buffer(self._memory)
        if (self._block.magic, self._block.block_bytes) != (MAGIC, ctypes.sizeof(Block)):
            raise ValueError(f"{path} is no control block of these stand-ins")
        self._last_number = 0

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        device_count: int = 2,
        cufile_mode: CufileMode = CufileMode.NVFS,
        compute_mode: ComputeMode = ComputeMode.DEFAULT,
        device_bytes_max: int = 1 << 30,
        mps: bool = False,
    ) -> "Control":
        """Makes the file. `device_bytes_max` is the memory of one device that one process may allocate; `mps`: an MPS server serves all devices."""
        if not 0 <= device_count <= 16:
            raise ValueError(f"device_count {device_count} is not in 0 to 16")
        block = Block(
            magic=MAGIC,
            block_bytes=ctypes.sizeof(Block),
            device_count=device_count,
            cufile_mode=cufile_mode,
            compute_mode=compute_mode,
            device_bytes_max=device_bytes_max,
            mps=mps,
            management=_management(),
        )
        path.write_bytes(bytes(block))
        return cls(path)

    # ---- faults ----

    def fail(self, function: str, code: int, *, skip: int = 0, times: int = EVERY_TIME, pid: int = 0) -> Fault:
        """Calls of `function` fail: `skip` calls pass first, then `times` fail. In process `pid`, or in all.

        `code` is a CUresult for the driver's functions and a CUfileOpError for cuFile's. For cuFileRead and cuFileWrite a code below 5000 is an errno, with -1
        returned. For "work" (any piece of stream work) and "copy" the context fails with the code, for ever, as after an illegal address on a GPU.
        """
        return self._set(function, Action.FAIL, code=code, skip=skip, times=times, pid=pid)

    def short(self, function: str, bytes_max: int, *, skip: int = 0, times: int = EVERY_TIME, pid: int = 0) -> Fault:
        """Calls of cuFileRead, cuFileWrite or their asynchronous and batch forms move at most `bytes_max`."""
        return self._set(function, Action.SHORT, value=bytes_max, skip=skip, times=times, pid=pid)

    def delay(self, function: str, microseconds: int, *, code: int = 0, skip: int = 0, times: int = EVERY_TIME, pid: int = 0) -> Fault:
        """Calls take that much longer, and then fail with `code` if it is not 0."""
        return self._set(function, Action.DELAY, value=microseconds, code=code, skip=skip, times=times, pid=pid)

    def hang(self, function: str, *, code: int = 0, skip: int = 0, times: int = EVERY_TIME, pid: int = 0) -> Fault:
        """Calls wait until the fault is cleared, and then fail with `code` if it is not 0."""
        return self._set(function, Action.HANG, code=code, skip=skip, times=times, pid=pid)

    def _set(self, function: str, action: Action, *, skip: int, times: int, pid: int, code: int = 0, value: int = 0) -> Fault:
        if len(function.encode()) >= NAME_BYTES:
            raise ValueError(f"{function!r} is longer than {NAME_BYTES - 1} bytes")
        for record in self._block.faults:
            # A record in which a call still waits is not used again, so that its count stays true.
            if record.active or record.waiting_now:
                continue
            self._last_number += 1
            ctypes.memset(ctypes.addressof(record), 0, ctypes.sizeof(record))
            record.pid, record.function, record.skip, record.times = pid, function.encode(), skip, times
            record.action, record.code, record.value = action, code, value
            record.active = self._last_number
            return Fault(record, self._last_number)
        raise RuntimeError(f"{FAULTS} faults are set; that is all that a control block has room for")

    # ---- the machine ----

    @property
    def cufile_mode(self) -> CufileMode:
        """The way that cuFile's transfers take from now on."""
        return CufileMode(self._block.cufile_mode)

    @cufile_mode.setter
    def cufile_mode(self, mode: CufileMode) -> None:
        self._block.cufile_mode = mode

    @property
    def compute_mode(self) -> ComputeMode:
        """Who may make contexts from now on."""
        return ComputeMode(self._block.compute_mode)

    @compute_mode.setter
    def compute_mode(self, mode: ComputeMode) -> None:
        self._block.compute_mode = mode

    @property
    def mps(self) -> bool:
        """Whether an MPS server serves all devices from now on."""
        return bool(self._block.mps)

    @mps.setter
    def mps(self, serves: bool) -> None:
        self._block.mps = serves

    @property
    def management(self) -> Management:
        """What the management library tells, to be read and set."""
        return self._block.management

    def limit_bar(self, bytes_max: int) -> None:
        """cuFile registers at most that many bytes of one device for one process; 0 for no limit."""
        self._block.bar_bytes_max = bytes_max

    def limit_host_registration(self, bytes_max: int) -> None:
        """cuMemHostRegister takes at most that many bytes in one process; 0 for no limit."""
        self._block.host_register_bytes_max = bytes_max

    def limit_device_memory(self, bytes_max: int) -> None:
        """A process may allocate at most that many bytes of one device."""
        self._block.device_bytes_max = bytes_max

    def forbid_stream_memory_operations(self) -> None:
        """Devices say that they have none (cuStreamWriteValue64 and the like), and refuse them; until `reset`."""
        self._block.no_stream_memory_operations = 1

    def hold(self) -> None:
        """As `Process.hold`, for all processes, those too that have not started yet."""
        self._block.hold = 1

    def release(self) -> None:
        """Ends `hold`; a process that is held by itself stays so."""
        self._block.hold = 0

    def reset(self) -> None:
        """Clears faults, holds, limits and what was set in `management`, so that nothing hangs any more."""
        self._block.management = _management()
        self._block.hold = self._block.bar_bytes_max = self._block.host_register_bytes_max = self._block.no_stream_memory_operations = 0
        for fault in self._block.faults:
            fault.active = 0
        for process in self._block.processes:
            process.hold = 0

    # ---- processes ----

    def __iter__(self) -> Iterator[Process]:
        return (Process(record) for record in self._block.processes if record.pid)

    def process(self, pid: int | None = None) -> Process:
        """The record of `pid`, of this process if None. Raises KeyError if it has not loaded the stand-ins on this control block."""
        pid = os.getpid() if pid is None else pid
        found = [process for process in self if process.pid == pid]
        if not found:
            raise KeyError(f"process {pid} has not loaded the stand-ins with control block {self.path}")
        return found[-1]


def environment(paths: Paths, control: Control, base: Mapping[str, str] | None = None, *, kernels: Path | None = None) -> dict[str, str]:
    """What a child process needs to find the stand-ins instead of a real driver; `base` (os.environ if None) stays beside it.

    `kernels`, made by `build_kernels`, puts the double of CuPy before CuPy, with those kernels.
    """
    made = dict(os.environ if base is None else base)
    others = made.get("LD_LIBRARY_PATH")
    made["LD_LIBRARY_PATH"] = f"{paths.directory}:{others}" if others else str(paths.directory)
    # Where the wheel nvidia-cufile is installed, cuda-pathfinder loads that by its path, whatever LD_LIBRARY_PATH says, unless a library of this soname is
    # there already. A process that never calls it is not changed by it, and takes no record.
    made["LD_PRELOAD"] = f"{paths.libcufile}:{made['LD_PRELOAD']}" if made.get("LD_PRELOAD") else str(paths.libcufile)
    made["CUDA_STANDIN_CONTROL"] = str(control.path)
    if kernels is not None:
        made["CUDA_STANDIN_KERNELS"] = str(kernels)
        made["PYTHONPATH"] = f"{CUPY}:{made['PYTHONPATH']}" if made.get("PYTHONPATH") else str(CUPY)
    return made


class Loaded:
    """The stand-ins in this process."""

    def __init__(self, cuda: ctypes.CDLL, cufile: ctypes.CDLL) -> None:
        self.cuda = cuda
        self.cufile = cufile
        self._alias = cuda.standin_alias
        self._alias.argtypes, self._alias.restype = [ctypes.c_uint64], ctypes.c_void_p

    def host_view(self, pointer: int, byte_count: int) -> memoryview:
        """Device memory as the host may read and write it: what is there at this moment, whatever streams still have to do."""
        address = self._alias(pointer)
        if address is None:
            raise ValueError(f"{pointer:#x} is no device memory of this process")
        return memoryview((ctypes.c_ubyte * byte_count).from_address(address)).cast("B")


def load(paths: Paths, control: Control) -> Loaded:
    """Loads the stand-ins into this process, for all libraries that ask for libcuda.so.1 or libcufile.so.0 later.

    Raises RuntimeError if another control block was used by an earlier call: a process has one for its life.
    """
    name = os.environ.setdefault("CUDA_STANDIN_CONTROL", str(control.path))
    if name != str(control.path):
        raise RuntimeError(f"this process uses the control block {name} already")
    cuda = ctypes.CDLL(str(paths.libcuda), mode=ctypes.RTLD_GLOBAL)
    return Loaded(cuda, ctypes.CDLL(str(paths.libcufile), mode=ctypes.RTLD_GLOBAL))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Polls until the condition holds. Raises TimeoutError naming `what`; the limit only ends a test that would never end."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.001)
