"""What NVIDIA's management library knows of each GPU: how it is set, how full it is, and who uses it.

It is asked through pynvml (package nvidia-ml-py), needs no context, and sees GPUs whatever CUDA_VISIBLE_DEVICES says, so they are told apart by UUID. Its
absence is told by `NvmlUnavailable`; what one GPU does not tell is None.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from offloadd.cuda.compute_mode import ComputeMode

LIBRARY = "libnvidia-ml.so.1"
PACKAGE = "nvidia-ml-py"


class NvmlUnavailable(Exception):
    """The library, its Python package or the driver is not there, or does not answer rightly; the message says which."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one moment. Sizes in bytes; None where the GPU (a MIG instance, a virtual GPU) does not tell."""

    uuid: str
    name: str
    pci_bus_id: str
    driver_version: str
    compute_mode: ComputeMode | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    bar1_bytes: int | None
    bar1_used_bytes: int | None
    #: Memory of each process that has a context, by its process id on the host: in a container that is not the id that the process has there.
    process_bytes: Mapping[int, int]
    mig: bool | None
    persistence: bool | None
    #: Errors of memory that could not be corrected, since the driver was loaded. None without ECC.
    uncorrected_errors: int | None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one GPU that is in use, by all processes and by each."""

    used_bytes: int | None
    process_bytes: Mapping[int, int]

    def grown_by(self, pid: int, before: "MemoryUse") -> int:
        """Bytes that the process `pid` has taken since `before`, when it had no context; 0 if that can't be told.

        In a container the library may know it by another id: then it is the one that came meanwhile. Without any such, what the GPU as a whole has more is
        taken for it, which other processes disturb.
        """
        came = {one: size for one, size in self.process_bytes.items() if one not in before.process_bytes}
        if pid in came:
            return came[pid]
        if len(came) == 1:
            return next(iter(came.values()))
        if self.used_bytes is None or before.used_bytes is None:
            return 0
        return max(0, self.used_bytes - before.used_bytes)


NOTHING_KNOWN = MemoryUse(None, {})


def read_gpus(library: str = LIBRARY) -> tuple[GpuState, ...]:
    """All GPUs, in the library's order. `library`: its name, or the path of the one to ask. Raises NvmlUnavailable."""
    with _library(library) as nvml:
        version = nvml.nvmlSystemGetDriverVersion()
        return tuple(_state(nvml, nvml.nvmlDeviceGetHandleByIndex(index), version) for index in range(nvml.nvmlDeviceGetCount()))


def read_memory_use(uuid: str) -> MemoryUse:
    """Of one GPU, or MIG instance, by its UUID; NOTHING_KNOWN where the library is not there or does not know it."""
    with suppress(NvmlUnavailable), _library(LIBRARY) as nvml:
        digits = uuid.partition("-")[2]
        for prefix in ("GPU", "MIG"):
            handle = _told(nvml, nvml.nvmlDeviceGetHandleByUUID, f"{prefix}-{digits}")
            if handle is not None:
                memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
                return MemoryUse(None if memory is None else int(memory.used), _processes(nvml, handle))
    return NOTHING_KNOWN


@contextmanager
def _library(name: str) -> Iterator[Any]:
    """The module, initialised for the time of the block; its errors become NvmlUnavailable."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(f"the Python package {PACKAGE} can't be imported ({error}); install offloadd with its extra cuda12 or cuda13") from error
    try:
        # pynvml loads it by its soname: what has that soname already is what it gets.
        ctypes.CDLL(name)
    except OSError as error:
        raise NvmlUnavailable(f"{name} can't be loaded ({error})") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"{name}: {error}") from error


def _state(nvml: Any, handle: Any, driver_version: str) -> GpuState:
    def told(call: Callable[..., Any], *arguments: int) -> Any:
        return _told(nvml, call, handle, *arguments)

    memory, bar1 = told(nvml.nvmlDeviceGetMemoryInfo), told(nvml.nvmlDeviceGetBAR1MemoryInfo)
    mode, mig, persistence = told(nvml.nvmlDeviceGetComputeMode), told(nvml.nvmlDeviceGetMigMode), told(nvml.nvmlDeviceGetPersistenceMode)
    errors = told(nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    pci = told(nvml.nvmlDeviceGetPciInfo)
    return GpuState(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=told(nvml.nvmlDeviceGetName) or "unknown model",
        pci_bus_id="" if pci is None else _text(pci.busId),
        driver_version=driver_version,
        compute_mode=ComputeMode(mode) if mode in tuple(ComputeMode) else None,
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        bar1_bytes=None if bar1 is None else int(bar1.bar1Total),
        bar1_used_bytes=None if bar1 is None else int(bar1.bar1Used),
        process_bytes=_processes(nvml, handle),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if persistence is None else bool(persistence),
        uncorrected_errors=None if errors is None else int(errors),
    )


def _processes(nvml: Any, handle: Any) -> dict[int, int]:
    """Clients of MPS stand in a list of their own, and their server in the other."""
    found: dict[int, int] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses):
        found |= {int(one.pid): int(one.usedGpuMemory or 0) for one in _told(nvml, call, handle) or ()}
    return found


def _told(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a GPU told, or None: it does not know, or this process may not ask."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
