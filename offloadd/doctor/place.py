"""Where a volume lies: its path, and the block device that it is or lies on."""

import os
import stat

from offloadd.doctor.mounts import mount_of
from offloadd.doctor.subject import Volume
from offloadd.machine.system import System


def located(system: System, volume: Volume) -> str:
    """The volume's path, its links followed where that can't hang: always in /dev, which lies in memory."""
    path = volume.options.path
    return system.real(path) if volume.follow_links or path.startswith("/dev/") else path


def block_device_number(system: System, volume: Volume) -> str | None:
    """`major:minor` of a volume that is a block device itself; None for a file."""
    directory, _, name = located(system, volume).rpartition("/")
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


def device_number(system: System, volume: Volume) -> str | None:
    """`major:minor` of the block device that the volume is or lies on; None if there is none (overlay, network, memory)."""
    number = block_device_number(system, volume)
    if number is not None:
        return number
    mount = mount_of(system, located(system, volume))
    if mount is None:
        return None
    if not mount.device.startswith("0:"):
        return mount.device
    # btrfs counts its mounts under device numbers of its own and names one disk as the source.
    return system.text(f"/sys/class/block/{mount.source.rpartition('/')[2]}/dev") if mount.source.startswith("/dev/") else None
