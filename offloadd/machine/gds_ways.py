"""Which ways of cuFile past the host reach a stack of block devices: nvidia-fs, and PCI P2PDMA mode without it."""

from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.machine.block import Layer
from offloadd.machine.system import System

NVFS = "/proc/driver/nvidia-fs"
#: What nvidia-fs must have hooked for each transport of NVMe.
_HOOKS = {"pcie": "nvme", "rdma": "nvme_rdma"}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a way is not possible, and what mends it."""

    cause: str
    mend: str = ""


def nvfs_obstacle(system: System) -> Obstacle | None:
    """What keeps nvidia-fs from working on this machine, whatever the volume; None if nothing is known to."""
    modules = system.modules()
    if modules is None or "nvidia_fs" not in modules:
        return Obstacle("nvidia-fs is not loaded", "modprobe nvidia-fs")
    if not any(name.startswith("nvidia-fs") for name in system.names("/dev")):
        return Obstacle("nvidia-fs is loaded, but /dev/nvidia-fs* is missing here", _nodes_mend(system))
    return None


def nvfs_hooks(system: System) -> set[str]:
    """Names of the storage drivers that nvidia-fs has hooked."""
    return {line.partition(":")[0].strip() for line in (system.text(f"{NVFS}/modules") or "").splitlines() if line.strip()}


def nvfs_obstacle_to(system: System, stack: Sequence[Layer]) -> Obstacle | None:
    """What keeps nvidia-fs from this stack; None if nothing is known to."""
    obstacle = nvfs_obstacle(system)
    if obstacle is not None:
        return obstacle
    missing = sorted({_HOOKS[transport] for transport in _transports(stack) & _HOOKS.keys()} - nvfs_hooks(system))
    if not missing:
        return None
    return Obstacle(f"nvidia-fs has not hooked {missing[0]}", "install DOCA or MLNX_OFED with NVMe support (--with-nvmf), then reboot")


def p2pdma_obstacle_to(stack: Sequence[Layer]) -> Obstacle | None:
    """What keeps PCI P2PDMA mode from this stack on any machine; None if nothing is known to."""
    if "rdma" in _transports(stack):
        return Obstacle("P2PDMA mode does not know NVMe-oF")
    if any(layer.kind.startswith("md") for layer in stack):
        return Obstacle("P2PDMA mode does not know RAID")
    return None


def _transports(stack: Sequence[Layer]) -> set[str]:
    return {controller.transport for layer in stack for controller in layer.controllers}


def _nodes_mend(system: System) -> str:
    return "docker run --device=/dev/nvidia-fs0 ...   # one for each of them" if system.in_container() else "modprobe -r nvidia-fs && modprobe nvidia-fs"
