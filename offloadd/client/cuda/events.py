"""CUDA events that order an engine's streams against the daemon's."""

from typing import Any

from offloadd.client.cuda.driver import Context, checked, handle_bytes, load_driver
from offloadd.errors import InvalidRequest

_EVENT_HINT = "torch.cuda.Event(interprocess=True, enable_timing=False) or cupy.cuda.Event(disable_timing=True, interprocess=True)"


class DeviceEvent:
    """A CUDA event that two processes share. Its calls may come from any thread, whatever CUDA context that has; they queue work and do not wait for it.

    It must outlive every use of its handle: close it only after the answers of all requests that name it. `new_event` makes it.
    """

    def __init__(self, context: "Context", event: Any, handle: bytes) -> None:
        self._context = context
        self._event = event
        #: IPC_HANDLE_BYTES, for the other process.
        self.handle = handle

    def record(self, stream_handle: int) -> None:
        """Have it happen when all work queued so far in the CUstream `stream_handle` (torch `cuda_stream`, CuPy `ptr`) is done. Raises PathUnavailable."""
        driver = self._open_driver()
        with self._context.current():
            checked(driver.cuEventRecord(self._event, stream_handle), f"the event can't be recorded in stream {stream_handle:#x}")

    def wait(self, stream_handle: int) -> None:
        """Let later work in the CUstream `stream_handle` wait for the latest record by either process, or for nothing if there is none.

        Raises PathUnavailable."""
        driver = self._open_driver()
        with self._context.current():
            checked(driver.cuStreamWaitEvent(stream_handle, self._event, 0), f"stream {stream_handle:#x} can't wait for the event")

    def close(self) -> None:
        """Destroy it; work that waits for it still does. May be called again."""
        event, self._event = self._event, None
        if event is None:
            return
        try:
            with self._context.current():
                checked(self._context.driver.cuEventDestroy(event), "the event can't be destroyed")
        finally:
            self._context.release()

    def _open_driver(self) -> Any:
        if self._event is None:
            raise InvalidRequest("the event is closed")
        return self._context.driver

    def __enter__(self) -> "DeviceEvent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_event(device: int | None = None) -> DeviceEvent:
    """An event for other processes, on the device of that ordinal in this process, or in the calling thread's CUDA context. Raises InvalidRequest (neither),
    PathUnavailable."""
    context = Context.open(load_driver(), device)
    driver = context.driver
    flags = driver.CUevent_flags.CU_EVENT_INTERPROCESS | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    try:
        with context.current():
            event = checked(driver.cuEventCreate(flags), "an event for other processes can't be made")
            try:
                return DeviceEvent(context, event, handle_bytes(checked(driver.cuIpcGetEventHandle(event), "the event can't be exported")))
            except BaseException:
                driver.cuEventDestroy(event)
                raise
    except BaseException:
        context.release()
        raise


def export_event(event: Any, device: int | None = None) -> bytes:
    """The IPC handle (IPC_HANDLE_BYTES) of a torch event, a CuPy event, or a raw, live CUevent, which must outlive every use of the handle.

    `device` is its ordinal in this process; without it the calling thread's CUDA context is taken. Raises InvalidRequest if the event was not made for other
    processes, PathUnavailable without a CUDA driver, and for its errors.
    """
    if isinstance(event, DeviceEvent):
        return event.handle
    raw = getattr(event, "cuda_event", getattr(event, "ptr", event))
    try:
        raw = int(raw)
    except (TypeError, ValueError):
        raise InvalidRequest(f"a {type(event).__name__} is no CUDA event: it has neither `cuda_event` nor `ptr`, and is no handle") from None
    if raw <= 0:
        raise InvalidRequest(f"the event's handle is {raw}: it does not exist yet; torch makes an event when it is first recorded, so record it before")
    context = Context.open(load_driver(), device)
    driver = context.driver
    try:
        with context.current():
            answer = driver.cuIpcGetEventHandle(driver.CUevent(raw))
    finally:
        context.release()
    if int(answer[0]) in (driver.CUresult.CUDA_ERROR_INVALID_HANDLE, driver.CUresult.CUDA_ERROR_INVALID_VALUE):
        raise InvalidRequest(f"the event was not made for other processes ({answer[0].name}); make it with {_EVENT_HINT}")
    return handle_bytes(checked(answer, "the event can't be exported"))
