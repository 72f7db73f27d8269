"""Launches by CuPy, which compiles the sources with NVRTC for the GPU that is there and keeps the result in CUPY_CACHE_DIR (default ~/.cupy)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.cuda.driver import CudaError
from offloadd.transfer.kernels.cuda import CudaKernels
from offloadd.transfer.kernels.source import KERNELS, OPTIONS, source


class CupyLauncher:
    """A `Launcher` on GPU `device`, counted as CUDA does in this process. Raises ImportError without CuPy, CuPy's own errors without a GPU."""

    def __init__(self, device: int, functions: dict[str, Any]) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._refusals = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
        self._asarray = cupy.asarray
        self._device = device
        self._functions = functions
        self._uploaded: list[Any] = []

    def upload(self, values: npt.NDArray[np.uint32]) -> int:
        """Copy to the GPU and wait for it on this thread's stream: launches may come on any other."""
        with self._cuda.Device(self._device):
            copy = self._asarray(values)
            self._cuda.get_current_stream().synchronize()
        self._uploaded.append(copy)
        return int(copy.data.ptr)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int], stream: int) -> None:
        """Queue a kernel. NumPy scalars keep their size on the way; a Python int would be refused from 2^63 on.

        CuPy 14 calls ExternalStream deprecated; what follows it does not exist in CuPy 13.
        """
        try:
            with self._cuda.Device(self._device), self._cuda.ExternalStream(stream, self._device):
                self._functions[kernel](grid, (threads,), tuple(np.uint64(argument) for argument in arguments))
        except self._refusals as error:
            raise CudaError(f"launch kernel {kernel!r} of {grid[0]} x {grid[1]} CTAs on cuda:{self._device}", "", str(error)) from error


@lru_cache(maxsize=16)
def compiled_kernels(device: int) -> dict[str, Any]:
    """The compiled kernels by name: once per process and GPU."""
    import cupy

    with cupy.cuda.Device(device):
        functions: dict[str, Any] = {}
        for name, kernels in KERNELS.items():
            module = cupy.RawModule(code=source(name), options=OPTIONS)
            # get_function compiles, so that the first restore does not have to.
            functions |= {kernel: module.get_function(kernel) for kernel in kernels}
        return functions


def open_cupy_kernels(device: int) -> CudaKernels:
    """Compile for GPU `device` (some seconds the first time, then from CuPy's cache) and upload the tables. Raises CudaError that says why it can't be."""
    operation = "compile the kernels"
    try:
        return CudaKernels(CupyLauncher(device, compiled_kernels(device)))
    except ImportError as error:
        raise CudaError(operation, "", f"CuPy can't be imported ({error}); install offloadd with its extra cuda12 or cuda13") from error
    except Exception as error:
        # CuPy's own kinds of errors, which only it could name: no compiler, no headers, a GPU that it does not know.
        raise CudaError(operation, "", f"{type(error).__name__}: {error}") from error
