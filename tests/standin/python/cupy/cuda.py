"""Devices and streams: which are current is a matter of the thread, and of streams one of the device, too."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

from ._driver import CUDADriverError, CUDARuntimeError, answer, call, current_device, device_count, set_device

runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=device_count)
driver = SimpleNamespace(CUDADriverError=CUDADriverError)

_NON_BLOCKING = 1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: list[int] = []
        self.streams: dict[int, list[_Stream]] = {}


_thread = _Thread()


class Device:
    """In a `with` block the current device. The one that was current before it is so again afterwards: for a thread that had none, the first."""

    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> "Device":
        before = current_device()
        set_device(self.id)
        _thread.devices.append(before)
        return self

    def __exit__(self, *error: object) -> None:
        set_device(_thread.devices.pop())


class _Stream:
    """In a `with` block the current stream of its device, which must be current, too."""

    def __init__(self, ptr: int, device: int) -> None:
        self.ptr = ptr
        self.device_id = device

    def __enter__(self) -> Any:
        if self.device_id != current_device():
            raise RuntimeError(f"the stream is one of device {self.device_id}; current is device {current_device()}")
        _thread.streams.setdefault(self.device_id, []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.streams[self.device_id].pop()

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        call("cuStreamSynchronize", self.ptr)


class Stream(_Stream):
    """A new stream of the current device, never destroyed."""

    def __init__(self, *, non_blocking: bool = False) -> None:
        device = current_device()
        set_device(device)
        super().__init__(answer("cuStreamCreate", ctypes.c_void_p, _NON_BLOCKING if non_blocking else 0), device)


class ExternalStream(_Stream):
    """A stream that somebody else made, by its handle."""


def get_current_stream() -> _Stream:
    """The current device's current stream; at first its default stream."""
    device = current_device()
    streams = _thread.streams.get(device)
    return streams[-1] if streams else ExternalStream(0, device)
