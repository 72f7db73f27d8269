"""Order of work on a GPU: streams, and events within a process and between processes."""

import ctypes
import time
from typing import Any

from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.imports import IPC_HANDLE_BYTES, open_event_handle

#: Between two looks at an event. The first is about what the system's timer can do; a longer last one would be seen in the latency of a single block.
_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 1e-3
#: A pause is at most this share of the time waited so far, so that a wait ends late by no more than it.
_PAUSE_SHARE = 1 / 8


class Event:
    """A point in a stream that others can wait for. Without times: those would cost the GPU a write and a wait. Any thread may call."""

    def __init__(self, device: Device, handle: Any) -> None:
        """See `create` and `open`."""
        self.device = device
        self._handle = handle

    @classmethod
    def create(cls, device: Device, *, interprocess: bool = False) -> "Event":
        """An event of this process; `interprocess` if another shall open it by `ipc_handle`."""
        device.make_current()
        flags = load().CUevent_flags
        chosen = int(flags.CU_EVENT_DISABLE_TIMING) | (int(flags.CU_EVENT_INTERPROCESS) if interprocess else 0)
        return cls(device, check(load().cuEventCreate(chosen), f"create an event on {device}"))

    @classmethod
    def open(cls, device: Device, handle: bytes) -> "Event":
        """The event of another process behind a 64-byte handle. Raises InvalidRequest for another length.

        CudaError: the process has ended, is this one, or lives in a container without a common /dev/shm.
        """
        return cls(device, open_event_handle(device, handle))

    @property
    def handle(self) -> Any:
        """The driver's event. Raises ValueError when it is closed."""
        if self._handle is None:
            raise ValueError(f"an event on {self.device} is used after it was closed")
        return self._handle

    def ipc_handle(self) -> bytes:
        """64 bytes by which another process opens an event that was created with `interprocess`. Raises CudaError for any other."""
        self.device.make_current()
        raw = check(load().cuIpcGetEventHandle(self.handle), f"export an event on {self.device}", "it must have been created as an interprocess event")
        return ctypes.string_at(raw.getPtr(), IPC_HANDLE_BYTES)

    def is_done(self) -> bool:
        """Whether the work before the latest `record` is done; True if it was never recorded. Raises CudaError when work on the device has failed."""
        self.device.make_current()
        cu = load()
        result = cu.cuEventQuery(self.handle)
        if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(result, f"wait for work on {self.device}")
        return True

    def synchronize(self, timeout_s: float) -> None:
        """Return when it is done. Raises TimeoutError after `timeout_s`, CudaError when work on the device has failed.

        Asks again and again, with pauses, instead of cuEventSynchronize: that has no time limit, so behind an engine that never comes it would keep a thread
        for ever, and the thread could not end.
        """
        begin = time.monotonic()
        while not self.is_done():
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                raise TimeoutError(f"work on {self.device} was not done within {timeout_s} s")
            time.sleep(min(max(waited_s * _PAUSE_SHARE, _PAUSE_S_MIN), _PAUSE_S_MAX))

    def close(self) -> None:
        """Give it back, at once; work that waits for it still does. May be called again."""
        if self._handle is None:
            return
        self.device.make_current()
        handle, self._handle = self._handle, None
        check(load().cuEventDestroy(handle), f"destroy an event on {self.device}")


class Stream:
    """A queue of work on a GPU, which does not wait for the default stream. For one thread at a time."""

    def __init__(self, device: Device, handle: Any, end: Event) -> None:
        """See `create`."""
        self.device = device
        self._handle = handle
        self._end = end

    @classmethod
    def create(cls, device: Device, *, priority: int = 0) -> "Stream":
        """`priority`: lower is sooner, by the driver's convention; it orders kernels, not copies. Raises ValueError outside of what the device has."""
        device.make_current()
        cu = load()
        least, greatest = check(cu.cuCtxGetStreamPriorityRange(), f"read the stream priorities of {device}")
        if not greatest <= priority <= least:
            raise ValueError(f"stream priority {priority} is outside {greatest} (soonest) to {least}, which {device} has")
        end = Event.create(device)
        try:
            handle = check(cu.cuStreamCreateWithPriority(cu.CUstream_flags.CU_STREAM_NON_BLOCKING, priority), f"create a stream on {device}")
        except BaseException:
            end.close()
            raise
        return cls(device, handle, end)

    @property
    def handle(self) -> Any:
        """The driver's stream; int() of it is its CUstream. Raises ValueError when it is closed."""
        if self._handle is None:
            raise ValueError(f"a stream on {self.device} is used after it was closed")
        return self._handle

    def record(self, event: Event) -> None:
        """Let `event` be done when all that is queued here now is."""
        self.device.make_current()
        check(load().cuEventRecord(event.handle, self.handle), f"record an event on {self.device}")

    def wait(self, event: Event) -> None:
        """Let what is queued here from now on begin only when `event`, as it was recorded last, is done. Returns at once."""
        self.device.make_current()
        check(load().cuStreamWaitEvent(self.handle, event.handle, 0), f"wait for an event on {self.device}")

    def synchronize(self, timeout_s: float) -> None:
        """Return when all that is queued now is done; see `Event.synchronize`. After TimeoutError the work may still come: its memory stays in use."""
        self.record(self._end)
        self._end.synchronize(timeout_s)

    def close(self) -> None:
        """Give it back, at once; what is queued is still done, and uses its memory until then. May be called again."""
        if self._handle is None:
            return
        self.device.make_current()
        handle, self._handle = self._handle, None
        try:
            check(load().cuStreamDestroy(handle), f"destroy a stream on {self.device}")
        finally:
            self._end.close()
