"""One GPU and its primary context."""

from pathlib import Path
from typing import Any

from offloadd.cuda.compute_mode import ComputeMode
from offloadd.cuda.driver import CudaError, check, load
from offloadd.memory.topology import node_of_pci_device
from offloadd.units import format_bytes

#: A PCI bus id is `0000:10:00.0` with its NUL.
_BUS_ID_BYTES = 16
_NAME_BYTES = 256


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

    @staticmethod
    def uuid_of(selector: str) -> str:
        """UUID of the GPU that `open` would open; no context is made. Raises CudaError that names the selector."""
        cu = load()
        operation = f"open device {selector!r}"
        return _uuid(cu, check(cu.cuDeviceGet(_ordinal(cu, selector, operation)), operation))

    @classmethod
    def open(cls, selector: str, *, root: Path = Path("/")) -> "Device":
        """Open `cuda:N` (among the GPUs that this process sees) or a UUID (`GPU-…`, `MIG-…`), and make it current in this thread.

        `root`: what sysfs is mounted under. Raises CudaError that names the selector: no such GPU, a compute mode that lets no second process in (under
        EXCLUSIVE_PROCESS, without MPS), no driver.
        """
        cu = load()
        operation = f"open device {selector!r}"
        ordinal = _ordinal(cu, selector, operation)
        handle = check(cu.cuDeviceGet(ordinal), operation)
        _refuse_compute_mode(cu, handle, operation)
        uuid = _uuid(cu, handle)
        name = _text(check(cu.cuDeviceGetName(_NAME_BYTES, handle), operation))
        numa_node = node_of_pci_device(_bus_id(cu, handle, operation), root)
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
    def uses_mps(self) -> bool:
        """Whether contexts of this process are clients of an MPS server, which shares one context of the GPU among them."""
        return _uses_mps(load(), self._handle)

    @property
    def pci_bus_id(self) -> str:
        """As sysfs writes it: `0000:10:00.0`."""
        return _bus_id(load(), self._handle, f"read the PCI bus id of cuda:{self.ordinal}")

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
    """EXCLUSIVE_PROCESS lets the engine in or us, never both: who comes first would win, and the other fail at a random moment. Clients of MPS are one."""
    mode = ComputeMode(_attribute(cu, handle, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE))
    if mode == ComputeMode.PROHIBITED:
        raise CudaError(operation, "", "its compute mode is PROHIBITED, so nobody can use it; `nvidia-smi -c DEFAULT` lets the engine and offloadd")
    if mode.is_exclusive and not _uses_mps(cu, handle):
        raise CudaError(
            operation,
            "",
            f"its compute mode is {mode.name} and MPS does not serve it, so the engine and offloadd can't both use it; `nvidia-smi -c DEFAULT` lets them, or "
            "`nvidia-cuda-mps-control -d` where both run as one user and with the same CUDA_MPS_PIPE_DIRECTORY",
        )


def _uses_mps(cu: Any, handle: Any) -> bool:
    try:
        return bool(_attribute(cu, handle, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED))
    except CudaError as error:
        if error.name != "CUDA_ERROR_INVALID_VALUE":
            raise
        # A driver before 12.2 does not know the question.
        return False


def _bus_id(cu: Any, handle: Any, operation: str) -> str:
    return _text(check(cu.cuDeviceGetPCIBusId(_BUS_ID_BYTES, handle), operation)).lower()


def _attribute(cu: Any, handle: Any, attribute: Any) -> int:
    return int(check(cu.cuDeviceGetAttribute(attribute, handle), f"read {attribute.name}"))


def _uuid(cu: Any, handle: Any) -> str:
    digits = bytes(check(cu.cuDeviceGetUuid(handle), "read the UUID of a GPU").bytes).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode()
