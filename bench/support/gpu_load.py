"""A load like an engine's decode, in a process of its own: steps that read weights and KV from GPU memory, each timed on the host after its stream has come.

By torch (its matrix products) where torch has the GPU, else by CuPy with a kernel of its own. What a step takes alone and beside something else tells how much
that disturbs a decode step.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from bench.support.process import Answer, Commanded, Handler, obey
from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.streams import Stream
from offloadd.transfer.kernels.cupy_launcher import CupyLauncher
from offloadd.transfer.kernels.source import OPTIONS
from offloadd.units import GIB, align_up

SOURCE = Path(__file__).with_suffix(".cu")
KERNELS = ("multiply", "read_through")
#: As of gpu_load.cu.
BATCH, ROWS, WORD_VALUES = 4, 4, 8
THREADS = 256
WARPS = THREADS // 32
#: Threads that read KV: some waves of them on any GPU of today.
READERS = 1 << 17
WARM_UP_STEPS = 5


class Shape(msgspec.Struct, frozen=True):
    """Layers, each with a matrix of bfloat16 weights (`rows` × `columns`) and `kv_bytes` of KV that a step reads."""

    layers: int
    rows: int
    columns: int
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.rows * self.columns * 2

    @classmethod
    def for_memory(cls, free_bytes: int) -> "Shape":
        """8 GiB of weights and 2 GiB of KV, which take 2 to 6 ms on GPUs of 2 to 5 TB/s, or a quarter of a smaller GPU."""
        layers, columns = 32, 4096
        share = min(1.0, free_bytes / 4 / (10 * GIB))
        return cls(layers, align_up(int(8 * GIB * share) // (layers * columns * 2), ROWS), columns, align_up(int(2 * GIB * share) // layers, 4096))


TINY = Shape(layers=2, rows=64, columns=256, kv_bytes=64 * 1024)


class Load(Protocol):
    """`kind` says by what the steps are done."""

    kind: str

    def step(self) -> None:
        """One step, to its end."""

    def close(self) -> None:
        """Give all memory back."""


class KernelLoad:
    """By the kernels of gpu_load.cu. Raises ImportError without CuPy."""

    def __init__(self, device: Device, shape: Shape) -> None:
        import cupy

        self.kind = f"kernels of its own by CuPy {getattr(cupy, '__version__', '(a double)')}"
        self._shape = shape
        with cupy.cuda.Device(device.ordinal):
            module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)
            functions = {name: module.get_function(name) for name in KERNELS}
        self._launcher = CupyLauncher(device.ordinal, functions)
        self.stream = Stream.create(device)
        self._held: list[DeviceMemory] = []
        self.weights = [self._memory(device, shape.rows * shape.columns * 2, 0x3C) for _ in range(shape.layers)]
        self.kv = [self._memory(device, shape.kv_bytes, 0x5A) for _ in range(shape.layers)]
        self.inputs = self._memory(device, BATCH * shape.columns * 4, 0)
        self.outputs = self._memory(device, BATCH * shape.rows * 4, 0)
        self.sums = self._memory(device, READERS * 4, 0)

    def _memory(self, device: Device, size_bytes: int, value: int) -> int:
        memory = DeviceMemory.allocate(device, size_bytes)
        self._held.append(memory)
        check(load().cuMemsetD8Async(memory.address, value, size_bytes, self.stream.handle), f"fill {size_bytes} bytes")
        return memory.address

    def step(self) -> None:
        """See `Load`."""
        shape, stream = self._shape, int(self.stream.handle)
        groups = -(-shape.rows // (ROWS * WARPS))
        for weights, kv in zip(self.weights, self.kv, strict=True):
            self._launcher.launch("multiply", (groups, 1), THREADS, [weights, self.inputs, self.outputs, shape.rows, shape.columns // WORD_VALUES], stream)
            words = shape.kv_bytes // 16
            readers = min(READERS, align_up(words, THREADS))
            self._launcher.launch("read_through", (readers // THREADS, 1), THREADS, [kv, self.sums, words, readers], stream)
        check(load().cuStreamSynchronize(self.stream.handle), "wait for a step")

    def close(self) -> None:
        """See `Load`."""
        self.stream.close()
        for memory in self._held:
            memory.close()


class TorchLoad:
    """By torch's matrix products on `place` ("cuda:N"). Raises ImportError without torch, RuntimeError where torch has no such device."""

    def __init__(self, place: str, shape: Shape) -> None:
        import torch

        self.kind = f"matrix products of torch {torch.__version__}"
        self._torch: Any = torch
        self._place = place
        self._weights = [torch.full((shape.rows, shape.columns), 0.01, dtype=torch.bfloat16, device=place) for _ in range(shape.layers)]
        self.kv = [torch.zeros(shape.kv_bytes // 4, dtype=torch.float32, device=place) for _ in range(shape.layers)]
        self._inputs = torch.ones((shape.columns, BATCH), dtype=torch.bfloat16, device=place)
        self.outputs: Any = None

    def step(self) -> None:
        """See `Load`."""
        for weights, kv in zip(self._weights, self.kv, strict=True):
            self.outputs = weights @ self._inputs
            kv.sum()
        if self._place.startswith("cuda"):
            self._torch.cuda.current_stream(self._place).synchronize()

    def close(self) -> None:
        """See `Load`."""
        self._weights.clear()
        self.kv.clear()


def open_load(device: Device, shape: Shape) -> Load:
    """By torch where it has the GPU, else by CuPy. Raises ImportError that names both where there is neither."""
    try:
        import torch

        if torch.cuda.is_available():
            return TorchLoad(f"cuda:{device.ordinal}", shape)
        why = "torch is installed and has no GPU"
    except ImportError as error:
        why = f"torch can't be imported ({error})"
    try:
        return KernelLoad(device, shape)
    except ImportError as error:
        raise ImportError(f"a decode load needs torch or CuPy: {why}, CuPy can't be imported ({error})") from error


class LoadProcess(Commanded):
    """The other end; `kind`, `weight_bytes` and `kv_bytes` of a step. Raises CommandedError where no load can be had, with the reason."""

    def __init__(self, device: str, *, tiny: bool, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("bench.support.gpu_load", {"device": device, "tiny": tiny}, environment)
        self.kind: str = self.ready["kind"]
        self.weight_bytes: int = self.ready["weight_bytes"]
        self.kv_bytes: int = self.ready["kv_bytes"]

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, one after the other."""
        seconds: list[float] = self.ask(steps=steps)["seconds"]
        return seconds


def _begin(setup: Answer, held: contextlib.ExitStack) -> tuple[Answer, Handler]:
    device = Device.open(setup["device"])
    held.callback(device.close)
    shape = TINY if setup["tiny"] else Shape.for_memory(device.free_bytes())
    work = open_load(device, shape)
    held.callback(work.close)
    for _ in range(WARM_UP_STEPS):
        work.step()

    def run(command: Answer) -> Answer:
        seconds = np.empty(command["steps"])
        for number in range(len(seconds)):
            start = time.perf_counter()
            work.step()
            seconds[number] = time.perf_counter() - start
        return {"seconds": seconds.tolist()}

    return {"kind": work.kind, "weight_bytes": shape.weight_bytes, "kv_bytes": shape.layers * shape.kv_bytes}, run


if __name__ == "__main__":
    obey(_begin)
