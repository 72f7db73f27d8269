"""cuMemcpyBatchAsync over NumPy arrays: any number of copies by one call of the driver.

Past the bindings, which ask for an object per address: for 4,096 pieces of 4 KiB they hold the interpreter for 1.5 ms, in which a GPU copies more than those
16 MiB. They also know only one of the two forms of the call, that of the version they were made for, and older drivers have only the other.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.cuda.driver import check, code_error, load
from offloadd.cuda.streams import Stream

#: The call came with 12.8; 13.0 left out the argument that tells which copy was refused.
_VERSION_WITH_FAILED_INDEX = 12080
_VERSION_WITHOUT = 13000
_FLAGS_DEFAULT = 0  # CU_GET_PROC_ADDRESS_DEFAULT
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class BatchCopy:
    """The call, as this driver has it."""

    def __init__(self, address: int, *, failed_index: bool) -> None:
        """See `find`. `failed_index`: whether the driver's form takes the address where it puts the number of a refused copy."""
        arguments = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, *([_POINTER] if failed_index else []), _POINTER]
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)  # a CFUNCTYPE call releases the GIL
        #: Never read, so threads may share it: CudaError is for the whole batch.
        self._failed = ctypes.c_size_t() if failed_index else None
        cu = load()
        self._attributes = cu.CUmemcpyAttributes()
        # Sources are read when the stream comes to them, not before: what the stream waits for may still write them.
        self._attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # Copy engines rather than SMs, which decode needs.
        self._attributes.flags = int(cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        self._starts = ctypes.c_size_t(0)

    @classmethod
    def find(cls, driver_version: int | None = None) -> "BatchCopy | None":
        """The call of a driver of that version (the loaded one's), None if it has none. A driver may be taken for an older one, never for a newer."""
        cu = load()
        if driver_version is None:
            driver_version = int(check(cu.cuDriverGetVersion(), "read the driver's version"))
        if driver_version < _VERSION_WITH_FAILED_INDEX:
            return None
        # Asked for a version above its own, a driver gives the newest form it has: so the question must fit the driver.
        version = _VERSION_WITHOUT if driver_version >= _VERSION_WITHOUT else _VERSION_WITH_FAILED_INDEX
        code, address, _ = cu.cuGetProcAddress(b"cuMemcpyBatchAsync", version, _FLAGS_DEFAULT)
        if int(code) or not address:
            return None
        return cls(int(address), failed_index=version < _VERSION_WITHOUT)

    def copy(self, targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], stream: Stream) -> None:
        """Queue copy i of `sizes[i]` bytes from address `sources[i]` to `targets[i]`; in no order among themselves. Raises CudaError."""
        arguments: list[Any] = [_address(targets), _address(sources), _address(sizes), len(sizes), self._attributes.getPtr(), ctypes.addressof(self._starts), 1]
        if self._failed is not None:
            arguments.append(ctypes.addressof(self._failed))
        stream.device.make_current()
        code = self._call(*arguments, int(stream.handle))
        if code:
            raise code_error(code, f"queue {len(sizes)} copies of {int(sizes.sum())} bytes on {stream.device}")


def _address(array: npt.NDArray[np.int64]) -> int:
    """Where a contiguous array lies; the driver reads 64-bit addresses and sizes, which are the same bits unsigned."""
    return np.ascontiguousarray(array).ctypes.data
