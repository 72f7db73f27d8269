"""Stands in for CuPy over the stand-in driver: as much of it as our kernels and their tests use.

NVRTC is a folder, named by CUDA_STANDIN_KERNELS, of sources that were compiled for the CPU before: others are refused.
"""

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _driver, cuda

__all__ = ["RawModule", "asarray", "cuda", "ndarray"]


class RawModule:
    """A source. It is loaded for each device when its first kernel is asked for there."""

    def __init__(self, *, code: str, options: Sequence[str] = ()) -> None:
        folder = Path(os.environ["CUDA_STANDIN_KERNELS"])
        if json.loads((folder / "options.json").read_text()) != list(options):
            raise ValueError(f"the kernels in {folder} were compiled with other options than {list(options)}")
        found = [path for path in sorted(folder.glob("*.cu")) if path.read_text() == code]
        if not found:
            raise ValueError(f"this source is not among those that were compiled in {folder}: {code[:80]!r}...")
        self._path = found[0].with_suffix(".so")
        self._modules: dict[int, int] = {}

    def get_function(self, name: str) -> "_Function":
        """A kernel on the current device."""
        device = _driver.current_device()
        _driver.set_device(device)
        if device not in self._modules:
            self._modules[device] = _driver.answer("cuModuleLoad", ctypes.c_void_p, os.fsencode(self._path))
        return _Function(_driver.answer("cuModuleGetFunction", ctypes.c_void_p, self._modules[device], name.encode()))


class _Function:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __call__(self, grid: tuple[int, int], block: tuple[int], arguments: tuple[np.uint64, ...]) -> None:
        """Queue it on the current stream."""
        wrong = [argument for argument in arguments if not isinstance(argument, np.uint64)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is a {type(wrong[0]).__name__}; a kernel for the stand-in takes numpy.uint64 alone")
        _driver.launch(self._handle, grid, block[0], np.array(arguments, dtype=np.uint64), cuda.get_current_stream().ptr)


#: Memory to be used again, by device and size, as CuPy's pool keeps it: giving it back would wait for the device.
_pool: dict[tuple[int, int], list[int]] = defaultdict(list)


class ndarray:
    """An array in the memory of the current device, copied there by the current stream."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        held = np.ascontiguousarray(values)
        device = _driver.current_device()
        _driver.set_device(device)
        # 512 bytes at least, and a power of two, so that there are few sizes.
        self._place = device, 1 << max(9, (held.nbytes - 1).bit_length())
        free = _pool[self._place]
        self.data = SimpleNamespace(ptr=free.pop() if free else _driver.answer("cuMemAlloc_v2", ctypes.c_uint64, self._place[1]))
        self.shape, self.dtype, self.nbytes = held.shape, held.dtype, held.nbytes
        _driver.call("cuMemcpyHtoDAsync_v2", self.data.ptr, held.ctypes.data, self.nbytes, cuda.get_current_stream().ptr)

    def get(self, *, stream: Any) -> npt.NDArray[Any]:
        """A copy in host memory, made by `stream`."""
        copy = np.empty(self.shape, dtype=self.dtype)
        _driver.call("cuMemcpyDtoHAsync_v2", copy.ctypes.data, self.data.ptr, self.nbytes, stream.ptr)
        stream.synchronize()
        return copy

    def __del__(self) -> None:
        if hasattr(self, "data"):
            _pool[self._place].append(self.data.ptr)


def asarray(values: npt.NDArray[Any]) -> ndarray:
    """A copy of a NumPy array on the current device."""
    return ndarray(values)
