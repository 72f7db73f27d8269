"""One GPU and its primary context."""

import enum
from pathlib import Path
from typing import Any

from offloadd.cuda.driver import CudaError, check, load
from offloadd.memory.topology import node_of_pci_device
from offloadd.units import format_bytes

#: A PCI bus id is `0000:10:00.0` with its NUL.
_BUS_ID_BYTES = 16
_NAME_BYTES = 256


class ComputeMode(enum.IntEnum):
    """Who may use a GPU; `nvidia-smi -c` sets it."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Device:
    """A GPU that this process uses. The primary context is shared with all libraries of the process, KvikIO among them, and retained until `close`.

    Any thread may call. What was made on the device (memory, streams, events) must be closed before it.
    """

    def __init__(self, *, ordinal: int, handle: Any, context: Any, uuid: str, name: str, numa_node: int) -> None:
        """See `open`. `ordinal`: the number among the GPUs that this process sees; `uuid`: as nvidia-smi prints it; `numa_node`: -1 if unknown."""
        self.ordinal = ordinal
        self.uuid = uuid
        self.name = name
        self.numa_node = numa_node
        self._handle = handle
        self._context = context
        self._closed = False

    @classmethod
    def open(cls, selector: str, *, root: Path = Path("/")) -> "Device":
        """Open `cuda:N` (among the GPUs that this process sees) or a UUID (`GPU-…`, `MIG-…`), and make it current in this thread.

        `root`: what sysfs is mounted under. Raises CudaError that names the selector: no such GPU, a compute mode that lets no second process in, no driver.
        """
        cu = load()
        operation = f"open device {selector!r}"
        ordinal = _ordinal(cu, selector, operation)
        handle = check(cu.cuDeviceGet(ordinal), operation)
        _refuse_compute_mode(cu, handle, operation)
        uuid = _uuid(cu, handle)
        name = _text(check(cu.cuDeviceGetName(_NAME_BYTES, handle), operation))
        numa_node = node_of_pci_device(_text(check(cu.cuDeviceGetPCIBusId(_BUS_ID_BYTES, handle), operation)), root)
        context = check(cu.cuDevicePrimaryCtxRetain(handle), operation)
        device = cls(ordinal=ordinal, handle=handle, context=context, uuid=uuid, name=name, numa_node=numa_node)
        try:
            device.make_current()
        except BaseException:
            device.close()
            raise
        return device

    def make_current(self) -> None:
        """Let the driver's calls of this thread go to this device. Cheap (0.2 µs), so every method that calls the driver does it anew.

        Raises ValueError when the device is closed.
        """
        if self._closed:
            raise ValueError(f"device cuda:{self.ordinal} ({self.uuid}) is closed")
        check(load().cuCtxSetCurrent(self._context), f"use device cuda:{self.ordinal}")

    @property
    def compute_mode(self) -> ComputeMode:
        """Who may use the GPU now; an administrator may change it at any time."""
        cu = load()
        return ComputeMode(_attribute(cu, self._handle, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE))

    @property
    def pitch_bytes_max(self) -> int:
        """Longest distance between two rows of a 2D copy."""
        cu = load()
        return _attribute(cu, self._handle, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH)

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU."""
        return int(check(load().cuDeviceTotalMem(self._handle), f"read the memory size of cuda:{self.ordinal}"))

    def free_bytes(self) -> int:
        """Memory of the GPU that no process has allocated now."""
        self.make_current()
        free, _ = check(load().cuMemGetInfo(), f"read the free memory of cuda:{self.ordinal}")
        return int(free)

    def close(self) -> None:
        """Give the context back; the driver destroys it when no library of the process retains it any more. May be called again."""
        if self._closed:
            return
        self._closed = True
        check(load().cuDevicePrimaryCtxRelease(self._handle), f"close device cuda:{self.ordinal}")

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.uuid})"


def _ordinal(cu: Any, selector: str, operation: str) -> int:
    handles = [check(cu.cuDeviceGet(number), operation) for number in range(check(cu.cuDeviceGetCount(), operation))]
    kind, _, rest = selector.partition(":")
    if kind == "cuda" and rest.isascii() and rest.isdecimal() and int(rest) < len(handles):
        return int(rest)
    wanted = selector.upper().removeprefix("GPU-").removeprefix("MIG-")
    for number, handle in enumerate(handles):
        if _uuid(cu, handle).upper().removeprefix("GPU-") == wanted:
            return number
    there = ", ".join(
        f"cuda:{number} {_uuid(cu, handle)} {_text(check(cu.cuDeviceGetName(_NAME_BYTES, handle), operation))} "
        f"{format_bytes(int(check(cu.cuDeviceTotalMem(handle), operation)))}"
        for number, handle in enumerate(handles)
    )
    raise CudaError(operation, "", f"no such GPU; a selector is cuda:N or GPU-<uuid>, and this process sees {there}")


def _refuse_compute_mode(cu: Any, handle: Any, operation: str) -> None:
    """EXCLUSIVE_PROCESS lets the engine in or us, never both: who comes first would win, and the other fail at a random moment."""
    mode = _attribute(cu, handle, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)
    if mode in (ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS):
        raise CudaError(
            operation,
            "",
            f"its compute mode is {ComputeMode(mode).name}, so the engine and offloadd can't both use it; `nvidia-smi -c DEFAULT` lets them",
        )


def _attribute(cu: Any, handle: Any, attribute: Any) -> int:
    return int(check(cu.cuDeviceGetAttribute(attribute, handle), f"read {attribute.name}"))


def _uuid(cu: Any, handle: Any) -> str:
    digits = bytes(check(cu.cuDeviceGetUuid(handle), "read the UUID of a GPU").bytes).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode()
