"""PCI devices that matter to a transfer, where they sit, and what stands between them."""

import re
from dataclasses import dataclass

from offloadd.machine.system import System
from offloadd.memory.topology import node_of_pci_device, read_topology

_DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`name` is what people call it (nvme0, mlx5_0); `numa_node` is -1 where the firmware does not tell."""

    address: str
    name: str
    numa_node: int


def nvidia_gpus(system: System) -> list[PciDevice]:
    """NVIDIA GPUs on the bus, with or without a driver: vendor 10de, display controllers of class 0300 (with outputs) and 0302 (without)."""
    found = []
    for address in system.names(_DEVICES):
        if system.text(f"{_DEVICES}/{address}/vendor") == "0x10de" and (system.text(f"{_DEVICES}/{address}/class") or "").startswith(("0x0300", "0x0302")):
            found.append(_device(system, address, f"GPU {address}"))
    return found


def nvme_drives(system: System) -> list[PciDevice]:
    """NVMe controllers on the bus."""
    return [
        _device(system, address, name)
        for name in system.names("/sys/class/nvme")
        if system.text(f"/sys/class/nvme/{name}/transport") == "pcie" and (address := system.text(f"/sys/class/nvme/{name}/address"))
    ]


def rdma_nics(system: System) -> list[PciDevice]:
    """RDMA devices on the bus; software ones (soft-RoCE) have no place on it."""
    found = []
    for name in system.names("/sys/class/infiniband"):
        address = system.real(f"/sys/class/infiniband/{name}/device").rpartition("/")[2]
        if _ADDRESS.fullmatch(address):
            found.append(_device(system, address, name))
    return found


def numa_distance(system: System, source: int, target: int) -> int | None:
    """The firmware's distance between two nodes (10: the same one); None if unknown."""
    node = read_topology(system.root).node(source)
    return node.distances.get(target) if node is not None else None


def iommu_kind(system: System, address: str) -> str:
    """How the IOMMU treats a device: `identity` passes addresses through, `DMA` and `DMA-FQ` translate them; empty without an IOMMU."""
    return system.text(f"{_DEVICES}/{address}/iommu_group/type") or ""


def bridges_above(system: System, address: str) -> list[str]:
    """PCI addresses from the root port down to the switch port above a device."""
    parts = system.real(f"{_DEVICES}/{address}").split("/")
    return [part for part in parts[:-1] if _ADDRESS.fullmatch(part)]


def acs_redirects(system: System, address: str) -> bool | None:
    """Whether a bridge sends peer-to-peer requests up to the root complex (ACS); None where that can't be read, which takes root."""
    try:
        config = system.path(f"{_DEVICES}/{address}/config").read_bytes()
    except OSError:
        return None
    if len(config) < 4096:
        return None
    # PCI Express Base Specification: extended capabilities are a linked list from 0x100; ACS has id 0x0d, its control register stands 6 bytes in.
    offset, seen = 0x100, set[int]()
    while offset >= 0x100 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == 0x0D:
            # Bits 2 and 3: redirect of requests and of completions.
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & 0x0C)
        offset = header >> 20
    return False


def _device(system: System, address: str, name: str) -> PciDevice:
    return PciDevice(address=address, name=name, numa_node=node_of_pci_device(address, system.root))
