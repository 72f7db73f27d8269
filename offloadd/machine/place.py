"""Where a volume lies: its path, the block device that it is or lies on, and the NVMe controllers behind that."""

import os
import stat

from offloadd.machine.block import layers
from offloadd.machine.mounts import mount_of
from offloadd.machine.system import System


def located(system: System, path: str, *, follow_links: bool) -> str:
    """The path with its links followed, without `follow_links` only where that can't hang: in /dev, which lies in memory."""
    return system.real(path) if follow_links or path.startswith("/dev/") else path


def block_device_number(system: System, path: str, *, follow_links: bool) -> str | None:
    """`major:minor` of a volume that is a block device itself; None for a file."""
    directory, _, name = located(system, path, follow_links=follow_links).rpartition("/")
    if not f"{directory}/".startswith("/dev/"):
        return None
    if directory == "/dev" and (number := system.text(f"/sys/class/block/{name}/dev")):
        return number
    # Containers have nodes of any name, such as one in /dev/mapper that is no link.
    try:
        status = system.path(f"{directory}/{name}").stat()
    except OSError:
        return None
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if stat.S_ISBLK(status.st_mode) else None


def device_number(system: System, path: str, *, follow_links: bool) -> str | None:
    """`major:minor` of the block device that the volume is or lies on; None if there is none (overlay, network, memory)."""
    number = block_device_number(system, path, follow_links=follow_links)
    if number is not None:
        return number
    mount = mount_of(system, located(system, path, follow_links=follow_links))
    if mount is None:
        return None
    if not mount.device.startswith("0:"):
        return mount.device
    # btrfs counts its mounts under device numbers of its own and names one disk as the source.
    return system.text(f"/sys/class/block/{mount.source.rpartition('/')[2]}/dev") if mount.source.startswith("/dev/") else None


def nvme_paths(system: System, path: str) -> str:
    """The NVMe controllers behind a volume with their transports, addresses and states, for people; empty if it lies on none. Never hangs, never raises.

    Of a volume whose path has links outside of /dev it may know nothing: they are not followed.
    """
    try:
        number = device_number(system, path, follow_links=False)
        stack = layers(system, number) if number is not None else []
    except OSError as error:
        return f"not known: {error}"
    return "; ".join(str(controller) for layer in stack for controller in layer.controllers)
