"""What lies behind a block device or a file: the layers down to disks and NVMe controllers, as sysfs shows them."""

import re
from dataclasses import dataclass

from offloadd.machine.system import System

#: Deeper stacks than this are a loop in a broken tree.
_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class Controller:
    """One NVMe controller, that is one path to a namespace. Times in seconds; -1 is off, None where the transport has no such thing."""

    name: str
    transport: str
    address: str
    state: str
    fast_io_fail_s: int | None
    ctrl_loss_s: int | None
    ana_state: str
    #: -1: not told.
    numa_node: int

    def __str__(self) -> str:
        shown = f"{self.name} ({self.transport}{', ' if self.address else ''}{self.address}) is {self.state or 'in no known state'}"
        if self.ana_state not in ("", "optimized"):
            shown += f", {self.ana_state}"
        if self.is_fabric and self.state != "live":
            shown += "; fast_io_fail_tmo is " + ("off" if self.fast_io_fail_s in (None, -1) else f"{self.fast_io_fail_s} s")
            shown += ", ctrl_loss_tmo " + ("off" if self.ctrl_loss_s in (None, -1) else f"{self.ctrl_loss_s} s")
        return shown

    @property
    def is_fabric(self) -> bool:
        """Whether a network lies between."""
        return self.transport not in ("pcie", "")


@dataclass(frozen=True, slots=True)
class Layer:
    """One block device of a stack. `kind`: nvme, crypt, lvm, dm, md LEVEL, loop, zram, virtio, scsi, or the name's letters."""

    name: str
    directory: str
    kind: str
    controllers: tuple[Controller, ...] = ()

    @property
    def is_disk(self) -> bool:
        """Whether nothing lies below."""
        return self.kind not in ("crypt", "lvm", "dm", "loop") and not self.kind.startswith("md")


def layers(system: System, number: str) -> list[Layer]:
    """The stack from the device with this number (`major:minor`) down to its disks, each once; empty where it is not known."""
    found: dict[str, Layer] = {}
    _walk(system, system.real(f"/sys/dev/block/{number}"), found, 0)
    return list(found.values())


def _walk(system: System, directory: str, found: dict[str, Layer], depth: int) -> None:
    # Without a link in /sys/dev/block (a container that hides it) nothing is known.
    if depth > _DEPTH_MAX or directory.startswith("/sys/dev/"):
        return
    if system.exists(f"{directory}/partition"):
        directory = directory.rpartition("/")[0]
    name = directory.rpartition("/")[2]
    if name in found:
        return
    kind = _kind(system, directory, name)
    found[name] = Layer(name=name, directory=directory, kind=kind, controllers=_controllers(system, directory, name) if kind == "nvme" else ())
    for below in system.names(f"{directory}/slaves"):
        _walk(system, system.real(f"{directory}/slaves/{below}"), found, depth + 1)


def _kind(system: System, directory: str, name: str) -> str:
    mapped = system.text(f"{directory}/dm/uuid")
    if mapped is not None:
        return "crypt" if mapped.startswith("CRYPT-") else "lvm" if mapped.startswith("LVM-") else "dm"
    level = system.text(f"{directory}/md/level")
    if level is not None:
        return f"md {level}"
    for prefix, kind in (("nvme", "nvme"), ("loop", "loop"), ("zram", "zram"), ("vd", "virtio"), ("sd", "scsi")):
        if name.startswith(prefix):
            return kind
    return name.rstrip("0123456789")


def _controllers(system: System, directory: str, name: str) -> tuple[Controller, ...]:
    device = system.real(f"{directory}/device")
    base = device.rpartition("/")[2]
    if not base.startswith("nvme-subsys"):
        return (_controller(system, device, name),)
    # Native multipath: the disk hangs on the subsystem, which has neither transport nor state; its controllers are the paths.
    paths = [system.real(f"{device}/{entry}") for entry in system.names(device) if re.fullmatch(r"nvme[0-9]+", entry)]
    return tuple(_controller(system, path, name) for path in paths)


def _controller(system: System, directory: str, disk: str) -> Controller:
    # The path disk of namespace nvme1n2 on the controller with id 3 is nvme1c3n2.
    subsystem, _, namespace = disk.rpartition("n")
    path_disk = next((entry for entry in system.names(directory) if re.fullmatch(rf"{subsystem}c[0-9]+n{namespace}", entry)), "")
    node = system.number(f"{directory}/numa_node")
    return Controller(
        name=directory.rpartition("/")[2],
        transport=system.text(f"{directory}/transport") or "",
        address=system.text(f"{directory}/address") or "",
        state=system.text(f"{directory}/state") or "",
        fast_io_fail_s=_seconds(system.text(f"{directory}/fast_io_fail_tmo")),
        ctrl_loss_s=_seconds(system.text(f"{directory}/ctrl_loss_tmo")),
        ana_state=system.text(f"{directory}/{path_disk}/ana_state") or "" if path_disk else "",
        numa_node=-1 if node is None else node,
    )


def _seconds(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else -1
