"""The GPU that is measured, and engine memory on it that another process may open."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.report import Detail
from offloadd.client.cuda import DeviceMemory as ExportedMemory
from offloadd.client.cuda import export_pointer
from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.plain import clear, copy
from offloadd.cuda.streams import Stream
from offloadd.memory.mapping import Bytes
from offloadd.model.region import Layout
from offloadd.mover.messages import IpcPiece

#: A series of calls is timed as one until it takes this long: a single one of 0.2 ms would be half the cost of waiting for it.
TIMED_S_MIN = 5e-3
CALLS_MAX = 16


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call, of `calls` that were timed as one; `queued_s`: until the host had queued them, so near `seconds` if the host was the slower side."""

    seconds: float
    queued_s: float


class Gpu:
    """A device with a stream, closed at the end of the `with` block. Raises CudaError that says why there is none."""

    def __init__(self, selector: str) -> None:
        self.selector = selector
        self.device = Device.open(selector)
        self.stream = Stream.create(self.device)

    @property
    def handle(self) -> int:
        """The stream's, for kernels."""
        return int(self.stream.handle)

    def synchronize(self) -> None:
        """Wait for the stream without the pauses of `Stream.synchronize`, which a benchmark would measure; nothing here waits for an engine."""
        check(load().cuStreamSynchronize(self.stream.handle), f"wait for work on {self.device}")

    def time(self, queue: Callable[[], None], calls: int = 1) -> Timed:
        """Time `calls` calls that queue work, and the work."""
        start = time.perf_counter()
        for _ in range(calls):
            queue()
        queued = time.perf_counter()
        self.synchronize()
        return Timed((time.perf_counter() - start) / calls, (queued - start) / calls)

    def calls_for(self, queue: Callable[[], None]) -> int:
        """How many calls to time as one; the first call warms up and the second is looked at."""
        self.time(queue)
        return max(1, min(CALLS_MAX, round(TIMED_S_MIN / self.time(queue).seconds)))

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Memory on the device; the caller's to close."""
        return DeviceMemory.allocate(self.device, size_bytes)

    def upload(self, values: npt.NDArray[Any]) -> DeviceMemory:
        """A copy of an array on the device; the caller's to close."""
        memory = self.allocate(values.nbytes)
        self.put(memory.address, values)
        return memory

    def put(self, address: int, values: npt.NDArray[Any]) -> None:
        """Copy an array to the device; it is there when this returns."""
        held = np.ascontiguousarray(values)
        self.device.make_current()
        check(load().cuMemcpyHtoD(address, held.ctypes.data, held.nbytes), f"copy {held.nbytes} bytes to {self.device}")
        # From pageable memory the call returns when the bytes have left it, and the last of them may be on their way still.
        check(load().cuStreamSynchronize(0), f"wait for copies to {self.device}")

    def get(self, address: int, values: npt.NDArray[Any]) -> None:
        """Fill an array from the device."""
        self.device.make_current()
        check(load().cuMemcpyDtoH(values.ctypes.data, address, values.nbytes), f"copy {values.nbytes} bytes from {self.device}")

    def wipe(self, address: int, size_bytes: int) -> None:
        """Zero memory of the device."""
        clear(address, size_bytes, self.stream)
        self.synchronize()

    def queue_copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue one plain copy, of the device or of page-locked memory: what ceilings are made of."""
        copy(target, source, size_bytes, self.stream)

    def facts(self) -> Detail:
        """What the driver says of the device."""
        version = int(check(load().cuDriverGetVersion(), "read the driver's version"))
        return {
            "gpu": self.device.name,
            "gpu_uuid": self.device.uuid,
            "gpu_memory_gib": round(self.device.total_bytes / (1 << 30), 1),
            "gpu_compute_mode": self.device.compute_mode.name,
            "gpu_numa_node": self.device.numa_node,
            "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
            "mps": "contexts go through MPS" if uses_mps(self.device) else "contexts do not go through MPS",
        }

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.device.close()


def uses_mps(device: Device) -> bool:
    """Whether contexts of this process on the device go through the multi-process service, as the driver says."""
    cu = load()
    handle = check(cu.cuDeviceGet(device.ordinal), f"look at {device}")
    return bool(int(check(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, handle), "read MPS_ENABLED")))


class EngineMemory:
    """KV memory as an engine has it, in one allocation, with bytes that tell places apart. A context manager."""

    def __init__(self, gpu: Gpu, layout: Layout) -> None:
        self.layout = layout
        self.size_bytes = layout.payload_bytes * layout.block_count
        self._gpu = gpu
        self._memory = gpu.allocate(self.size_bytes)
        self.address = self._memory.address
        self._original: Bytes = np.random.default_rng(3).integers(0, 256, self.size_bytes, dtype=np.uint8)
        self.fill()

    def fill(self) -> None:
        """Put the bytes there (again)."""
        self._gpu.put(self.address, self._original)

    def wipe(self) -> None:
        """Zero it."""
        self._gpu.wipe(self.address, self.size_bytes)

    def require_original(self, what: str) -> None:
        """Raise RuntimeError unless every byte is as it was filled: a fast wrong copy is no figure."""
        found = np.empty_like(self._original)
        self._gpu.get(self.address, found)
        wrong = int((found != self._original).sum())
        if wrong:
            raise RuntimeError(f"{what}: {wrong} of {self.size_bytes} bytes are not those that were there before")

    def payload(self, block: int) -> Bytes:
        """The bytes of one block, in the order of its planes."""
        places = [(plane.offset_bytes + block * plane.block_stride_bytes, plane.block_bytes) for plane in self.layout.planes]
        return np.concatenate([self._original[begin : begin + size_bytes] for begin, size_bytes in places])

    def export(self) -> ExportedMemory:
        """For a client of the daemon."""
        return export_pointer(self.address, self.size_bytes)

    def piece(self) -> IpcPiece:
        """For a mover."""
        exported = self.export()
        return IpcPiece(exported.ipc_handle, exported.offset_bytes)

    def __enter__(self) -> "EngineMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
