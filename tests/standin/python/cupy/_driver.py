"""The driver's calls by ctypes, with its errors as exceptions, and the current device as the CUDA runtime keeps it."""

import ctypes
import threading
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_ADDRESS, _INT, _UNSIGNED, _SIZE, _TEXT, _DEVICE_POINTER = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.c_uint64,
)
_PARAMETERS = {
    "cuInit": (_UNSIGNED,),
    "cuGetErrorName": (_INT, _ADDRESS),
    "cuDeviceGetCount": (_ADDRESS,),
    "cuDevicePrimaryCtxRetain": (_ADDRESS, _INT),
    "cuCtxSetCurrent": (_ADDRESS,),
    "cuCtxGetCurrent": (_ADDRESS,),
    "cuCtxGetDevice": (_ADDRESS,),
    "cuMemAlloc_v2": (_ADDRESS, _SIZE),
    "cuMemcpyHtoDAsync_v2": (_DEVICE_POINTER, _ADDRESS, _SIZE, _ADDRESS),
    "cuMemcpyDtoHAsync_v2": (_ADDRESS, _DEVICE_POINTER, _SIZE, _ADDRESS),
    "cuStreamCreate": (_ADDRESS, _UNSIGNED),
    "cuStreamSynchronize": (_ADDRESS,),
    "cuModuleLoad": (_ADDRESS, _TEXT),
    "cuModuleGetFunction": (_ADDRESS, _ADDRESS, _TEXT),
    "cuLaunchKernel": (_ADDRESS, *[_UNSIGNED] * 7, _ADDRESS, _ADDRESS, _ADDRESS),
}
_lock = threading.Lock()
_contexts: dict[int, int] = {}


class CUDAError(RuntimeError):
    """`status` is the driver's code, a CUresult."""

    def __init__(self, status: int) -> None:
        name = ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(name))
        super().__init__((name.value or str(status).encode()).decode())
        self.status = status


class CUDADriverError(CUDAError):
    """CuPy gives it for modules and launches."""


class CUDARuntimeError(CUDAError):
    """CuPy gives it for all else."""


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, parameters in _PARAMETERS.items():
        getattr(library, name).argtypes = parameters
    return library


def call(name: str, *values: Any) -> None:
    """A call of the driver."""
    status = getattr(_library(), name)(*values)
    if status:
        raise (CUDADriverError if name.startswith(("cuModule", "cuLaunch")) else CUDARuntimeError)(status)


def answer(name: str, kind: type[Any], *values: Any) -> int:
    """What a call puts where its first argument points."""
    result = kind()
    call(name, ctypes.byref(result), *values)
    return result.value or 0


def device_count() -> int:
    """GPUs that this process sees."""
    call("cuInit", 0)
    return answer("cuDeviceGetCount", _INT)


def current_device() -> int:
    """The device of the thread's context; the first one for a thread that has none, as the runtime says."""
    call("cuInit", 0)
    return answer("cuCtxGetDevice", _INT) if answer("cuCtxGetCurrent", _ADDRESS) else 0


def set_device(device: int) -> None:
    """Make the device's primary context the thread's. The first time it is retained, for the life of the process."""
    call("cuInit", 0)
    with _lock:
        if device not in _contexts:
            _contexts[device] = answer("cuDevicePrimaryCtxRetain", _ADDRESS, device)
    call("cuCtxSetCurrent", _contexts[device])


def launch(function: int, grid: tuple[int, int], threads: int, arguments: npt.NDArray[np.uint64], stream: int) -> None:
    """Queue a kernel. The driver copies the arguments; a null pointer behind the last shows it that there are too few."""
    pointers = [arguments.ctypes.data + number * arguments.itemsize for number in range(arguments.size)]
    table = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)
    call("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, table, None)
