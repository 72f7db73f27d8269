"""Host memory that an engine shares with the daemon: a sealed memfd, mapped here, seen as NumPy arrays or torch tensors."""

import math
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offloadd.errors import InvalidRequest
from offloadd.memory.memfd import create_sealed, map_shared, validate_sealed

if TYPE_CHECKING:
    import torch


class HostMemory:
    """A piece of memory to register regions in. The daemon maps the same pages: nothing is copied to hand it over."""

    def __init__(self, fd: int, mapping: mmap.mmap, memory_bytes: int) -> None:
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self.memory_bytes = memory_bytes

    @classmethod
    def allocate(cls, memory_bytes: int, name: str = "kv", huge_pages: bool = False) -> "HostMemory":
        """New zeroed memory of `memory_bytes` bytes. `huge_pages` takes reserved 2 MiB pages where the system has them. Raises InvalidRequest, OSError."""
        return cls.from_fd(create_sealed(name, memory_bytes, huge_pages))

    @classmethod
    def from_fd(cls, fd: int) -> "HostMemory":
        """Memory of an existing sealed memfd, which belongs to the new object from here on, also if this raises InvalidRequest (seals) or OSError."""
        try:
            memory_bytes = validate_sealed(fd)
            return cls(fd, map_shared(fd, memory_bytes), memory_bytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The memfd."""
        self._refuse_closed()
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping is None

    def numpy(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset_bytes: int = 0) -> npt.NDArray[Any]:
        """A writable array of `shape` over the memory from `offset_bytes` on, without a copy. Raises InvalidRequest if it does not fit."""
        kind = np.dtype(dtype)
        mapping = self._window(math.prod(shape) * kind.itemsize, offset_bytes)
        return np.frombuffer(mapping, dtype=kind, count=math.prod(shape), offset=offset_bytes).reshape(shape)

    def torch(self, dtype: "torch.dtype", shape: tuple[int, ...], offset_bytes: int = 0) -> "torch.Tensor":
        """A CPU tensor of `shape` over the memory from `offset_bytes` on, without a copy. Raises InvalidRequest if it does not fit."""
        import torch

        mapping = self._window(math.prod(shape) * dtype.itemsize, offset_bytes)
        return torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=offset_bytes).reshape(shape)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping; arrays and tensors made from it keep it until they go. May be called again."""
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        os.close(self._fd)
        try:
            mapping.close()
        except BufferError:
            # Arrays still look into it: unmapping now would be a crash at their next use. The mapping goes with the last of them.
            return

    def _window(self, size_bytes: int, offset_bytes: int) -> mmap.mmap:
        self._refuse_closed()
        if size_bytes < 1 or offset_bytes < 0 or offset_bytes + size_bytes > self.memory_bytes:
            raise InvalidRequest(f"a view of {size_bytes} bytes at byte {offset_bytes} does not fit; the memory has {self.memory_bytes} bytes")
        assert self._mapping is not None
        return self._mapping

    def _refuse_closed(self) -> None:
        if self._mapping is None:
            raise InvalidRequest("the memory is closed")

    def __enter__(self) -> "HostMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostMemory(memory_bytes={self.memory_bytes}{', closed' if self.closed else ''})"
