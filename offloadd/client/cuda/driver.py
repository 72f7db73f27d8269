"""The CUDA driver as the client uses it: loaded at its first use, its errors as ours, its contexts entered and left."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offloadd.errors import InvalidRequest, PathUnavailable

#: Bytes of cudaIpcMemHandle_t and cudaIpcEventHandle_t.
IPC_HANDLE_BYTES = 64


class Context:
    """A CUDA context that calls run in, in whatever thread."""

    def __init__(self, driver: Any, handle: Any, retained_device: int | None = None) -> None:
        self.driver = driver
        self._handle = handle
        self._retained_device = retained_device

    @classmethod
    def open(cls, driver: Any, device: int | None) -> "Context":
        """The primary context of a device, retained until `release`, or that of the calling thread."""
        if device is not None:
            count = checked(driver.cuDeviceGetCount(), "the devices can't be counted")
            if not 0 <= device < count:
                raise InvalidRequest(f"there is no device {device}; this process sees {count}")
            return cls(driver, checked(driver.cuDevicePrimaryCtxRetain(device), f"device {device} gives no context"), device)
        current = checked(driver.cuCtxGetCurrent(), "the thread's context can't be asked for")
        if not int(current):
            raise InvalidRequest("no CUDA context is current in this thread; name the device")
        return cls(driver, current)

    @property
    def key(self) -> int:
        """Tells it from other contexts of the process."""
        return int(self._handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """It is the calling thread's context within."""
        checked(self.driver.cuCtxPushCurrent(self._handle), "the context can't be entered")
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def release(self) -> None:
        """Give back what `open` retained."""
        if self._retained_device is not None:
            self.driver.cuDevicePrimaryCtxRelease(self._retained_device)


def load_driver() -> Any:
    """cuda.bindings.driver, ready for use."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PathUnavailable("GPU memory needs the package cuda-bindings, which is not installed (pip install cuda-bindings)") from error
    try:
        answer = driver.cuInit(0)
    except RuntimeError as error:
        # How cuda-bindings says that there is no libcuda.so.1.
        raise PathUnavailable(f"there is no CUDA driver on this machine: {error}") from error
    checked(answer, "the CUDA driver can't be used in this process")
    return driver


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call. Raises PathUnavailable if it failed."""
    error, *values = answer
    if int(error):
        raise PathUnavailable(f"{what}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def handle_bytes(handle: Any) -> bytes:
    """The bytes of a CUipcMemHandle or CUipcEventHandle."""
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)
