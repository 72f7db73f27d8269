"""Device checks of a volume, from mountinfo and sysfs alone: they answer while the volume itself hangs."""

import re
from collections.abc import Iterator

from offloadd.doctor import nvidia, pci
from offloadd.doctor.checks.gpu import NO_GPU
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.gds import p2pdma_obstacle
from offloadd.doctor.subject import Volume
from offloadd.machine.block import Controller, Layer, layers
from offloadd.machine.gds_ways import Obstacle, nvfs_obstacle_to, p2pdma_obstacle_to
from offloadd.machine.mounts import Mount, mount_of, mounts
from offloadd.machine.place import block_device_number, device_number, located
from offloadd.machine.system import System

_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "9p", "virtiofs", "fuse.glusterfs", "gpfs", "wekafs"})
_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
#: A path that is lost for less than this heals by itself; a shorter ctrl_loss_tmo removes the disk under the file system instead.
_CTRL_LOSS_S_MIN = 60

#: What each layer between a file system and its disk costs.
_LAYER_COST = {
    "crypt": "each byte is encrypted by a CPU",
    "dm": "one more layer for each I/O",
    "lvm": "one more layer for each I/O",
    "loop": "each I/O passes a second file system and a kernel thread",
    "md": "writes are split over drives and may wait for parity",
    "zram": "memory, compressed: lost with the machine",
}


def _stack(system: System, volume: Volume) -> list[Layer]:
    number = device_number(system, volume.options.path, follow_links=volume.follow_links)
    return layers(system, number) if number else []


def _controllers(stack: list[Layer]) -> list[Controller]:
    return [controller for layer in stack for controller in layer.controllers]


def check_file_system(system: System, volume: Volume) -> Iterator[Finding]:
    """Which file system the volume lies on, and what it costs."""
    itself = block_device_number(system, volume.options.path, follow_links=volume.follow_links)
    if itself is not None:
        mounted = next((mount for mount in mounts(system) if mount.device == itself), None)
        if mounted is not None:
            yield fail(f"the block device is mounted at {mounted.point}", f"umount {mounted.point}   # or make the volume a file there")
        else:
            yield ok("block device, no file system")
        return
    mount = mount_of(system, located(system, volume.options.path, follow_links=volume.follow_links))
    if mount is None:
        yield not_applicable("/proc/self/mountinfo does not tell")
        return
    yield _file_system(mount)
    number = device_number(system, volume.options.path, follow_links=volume.follow_links)
    source = system.real(f"/sys/dev/block/{number}").rpartition("/")[2]
    if mount.kind == "ext4" and (errors := system.number(f"/sys/fs/ext4/{source}/errors_count")):
        # With errors=remount-ro /proc/mounts goes on saying rw.
        yield fail(f"ext4 has counted {errors} errors on {source}: it may have turned read-only", f"umount {mount.point} && e2fsck -f /dev/{source}")


def _file_system(mount: Mount) -> Finding:
    where = f"{mount.kind} at {mount.point}"
    if "ro" in mount.options:
        return fail(f"{where} is mounted read-only", f"mount -o remount,rw {mount.point}")
    if mount.kind == "xfs":
        return ok(where)
    if mount.kind == "ext4":
        mode = mount.option("data") or "ordered"
        if mode == "ordered":
            return ok(f"{where}, data=ordered")
        cost = "each block is written twice" if mode == "journal" else "a power cut can leave old bytes in new blocks"
        return warn(
            f"{where}, data={mode}: {cost}, and cuFile takes compat mode", f"mount it with data=ordered in /etc/fstab, then umount and mount {mount.point}"
        )
    if mount.kind == "overlay":
        return warn(
            f"{where}: the container's own layer, gone with it; cuFile takes compat mode", "docker run -v /data/kv:/data/kv ...   # xfs or ext4 of the host"
        )
    if mount.kind == "tmpfs":
        return warn(f"{where}: memory, lost with the machine", "put the volume on xfs or ext4")
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        return warn(f"{where}: every I/O goes through a network or a user process and may stall", "put the volume on xfs or ext4 on NVMe")
    if mount.kind in _COPY_ON_WRITE:
        return warn(f"{where}: copies on write, so prewritten slabs move and fragment", "put the volume on xfs or ext4")
    return warn(f"{where}: not tried with offloadd", "put the volume on xfs or ext4")


def check_stack(system: System, volume: Volume) -> Iterator[Finding]:
    """The block devices from the file system down to the disks."""
    stack = _stack(system, volume)
    if not stack:
        yield not_applicable("no block device behind it is visible here")
        return
    shown = " > ".join(f"{layer.name} ({layer.kind})" for layer in stack)
    costly = [layer for layer in stack if layer.kind.partition(" ")[0] in _LAYER_COST]
    if not costly:
        yield ok(shown)
    for layer in costly:
        cost = _LAYER_COST[layer.kind.partition(" ")[0]]
        file = system.text(f"{layer.directory}/loop/backing_file")
        yield warn(f"{shown}: {cost}{f' (on {file})' if file else ''}", "put the volume on a drive of its own, without layers between")


def check_paths(system: System, volume: Volume) -> Iterator[Finding]:
    """NVMe controllers: over what they are reached, and whether they are."""
    controllers = _controllers(_stack(system, volume))
    if not controllers:
        yield not_applicable("no NVMe controller behind it is visible here")
        return
    live = [controller for controller in controllers if controller.state == "live"]
    shown = "; ".join(
        " ".join(part for part in (controller.name, controller.transport, controller.state, controller.ana_state, controller.address) if part)
        for controller in controllers
    )
    if not live:
        yield fail(f"no path is live, I/O stalls: {shown}", _reach(controllers[0]))
    elif len(live) < len(controllers):
        lost = next(controller for controller in controllers if controller.state != "live")
        yield warn(f"{len(controllers) - len(live)} of {len(controllers)} paths lost: {shown}", _reach(lost))
    else:
        yield ok(shown)


def _reach(controller: Controller) -> str:
    match = re.search(r"traddr=([^,]+)", controller.address)
    if controller.is_fabric and match:
        return f"ping {match[1]}; dmesg | grep {controller.name}"
    return f"nvme reset /dev/{controller.name}; dmesg | grep {controller.name}"


def check_timeouts(system: System, volume: Volume) -> Iterator[Finding]:
    """How long I/O waits for a target that is gone."""
    fabric = [controller for controller in _controllers(_stack(system, volume)) if controller.is_fabric]
    if not fabric:
        yield not_applicable("no fabric between")
        return
    for controller in fabric:
        directory = f"/sys/class/nvme/{controller.name}"
        loss = controller.ctrl_loss_s
        until = "for ever" if loss is None or loss < 0 else f"{loss} s"
        if controller.fast_io_fail_s is None or controller.fast_io_fail_s < 0:
            # Measured: the process is in D state meanwhile and survives SIGKILL.
            yield warn(f"{controller.name}: fast_io_fail_tmo is off: I/O blocks {until} when the target is gone", f"echo 5 > {directory}/fast_io_fail_tmo")
        elif loss is not None and 0 <= loss < _CTRL_LOSS_S_MIN:
            # Measured: then the disk disappears, XFS shuts down, and only unmount, reconnect and mount bring it back.
            yield warn(
                f"{controller.name}: ctrl_loss_tmo is {loss} s: after that the disk is removed and must be mounted again",
                f"echo 600 > {directory}/ctrl_loss_tmo",
            )
        else:
            yield ok(f"{controller.name}: I/O fails after {controller.fast_io_fail_s} s, reconnects {until}")


def check_multipath(system: System, volume: Volume) -> Iterator[Finding]:
    """How many ways lead to a namespace on a fabric."""
    for layer in _stack(system, volume):
        if not any(controller.is_fabric for controller in layer.controllers):
            continue
        policy = system.text(f"{system.real(f'{layer.directory}/device')}/iopolicy")
        count = len(layer.controllers)
        if count > 1:
            yield ok(f"{layer.name}: {count} paths, policy {policy}")
        else:
            yield ok(f"{layer.name}: one path; a second one (nvme connect to another port) would take over in under a second")
        return
    yield not_applicable("no fabric between")


def check_queue(system: System, volume: Volume) -> Iterator[Finding]:
    """The disk's queue: scheduler, rotation, write cache."""
    disks = [layer for layer in _stack(system, volume) if layer.is_disk]
    if not disks:
        yield not_applicable("no disk behind it is visible here")
    for disk in disks:
        queue = f"{disk.directory}/queue"
        scheduler = (system.text(f"{queue}/scheduler") or "none").partition("[")[2].partition("]")[0] or "none"
        cache = system.text(f"{queue}/write_cache") or "unknown"
        if system.text(f"{queue}/rotational") == "1" and disk.kind not in ("virtio", "loop"):
            yield warn(f"{disk.name} rotates: restores seek", "put the volume on NVMe")
        elif disk.kind == "nvme" and scheduler != "none":
            yield warn(f"{disk.name}: scheduler {scheduler} costs CPU and order on NVMe", f"echo none > /sys/block/{disk.name}/queue/scheduler")
        else:
            yield ok(f"{disk.name}: scheduler {scheduler}, write cache: {cache}{', flushed for DURABLE' if cache == 'write back' else ''}")


def check_distance(system: System, volume: Volume) -> Iterator[Finding]:
    """Whether the volume's drives, or the NICs that lead to them, sit with the GPUs."""
    gpus = [gpu for gpu in pci.nvidia_gpus(system) if gpu.numa_node >= 0]
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    sources: dict[str, int] = {}
    for controller in _controllers(_stack(system, volume)):
        if controller.transport == "pcie":
            node = system.number(f"/sys/bus/pci/devices/{controller.address}/numa_node")
            sources[controller.name] = controller.numa_node if node is None else node
        elif controller.transport == "rdma":
            sources.update({nic.name: nic.numa_node for nic in pci.rdma_nics(system)})
    nodes = {node for node in sources.values() if node >= 0}
    if not nodes:
        yield not_applicable("the node of its drive or NIC is not told")
        return
    far = [gpu for gpu in gpus if gpu.numa_node not in nodes]
    shown = ", ".join(f"{name} on node {node}" for name, node in sources.items() if node >= 0)
    if far:
        node = min(nodes)
        distance = pci.numa_distance(system, node, far[0].numa_node) or "unknown"
        yield warn(
            f"{shown}; {len(far)} of {len(gpus)} GPUs are on other nodes (distance {distance}): their I/O crosses sockets",
            f"give the engines on those GPUs a volume on a drive of node {far[0].numa_node}",
        )
    else:
        yield ok(f"{shown}; all {len(gpus)} GPUs have one of these nodes")


def check_gds_mode(system: System, volume: Volume) -> Iterator[Finding]:
    """Which way cuFile could take to this volume: nvfs, p2pdma, or compat with the reason. The daemon's own probe is the proof."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    obstacle = _volume_obstacle(system, volume)
    if obstacle is not None:
        yield warn(f"compat: {obstacle.cause}", obstacle.mend)
        return
    stack = _stack(system, volume)
    nvfs = nvfs_obstacle_to(system, stack)
    if nvfs is None:
        yield ok("nvfs is possible: nvidia-fs moves the bytes")
        return
    local = p2pdma_obstacle_to(stack) or p2pdma_obstacle(system)
    if local is None:
        yield ok("p2pdma is possible: the NVMe driver moves the bytes")
    else:
        yield warn(f"compat: {nvfs.cause}; {local.cause}", nvfs.mend)


def _volume_obstacle(system: System, volume: Volume) -> Obstacle | None:
    """What forces compat mode for this volume on any machine."""
    if not system.exists("/run/udev"):
        return Obstacle("/run/udev is missing", "docker run -v /run/udev:/run/udev:ro ...")
    mount = mount_of(system, located(system, volume.options.path, follow_links=volume.follow_links))
    if block_device_number(system, volume.options.path, follow_links=volume.follow_links) is None and mount is not None:
        if mount.kind not in ("xfs", "ext4"):
            return Obstacle(f"the file system is {mount.kind}", "put the volume on xfs or ext4")
        if mount.kind == "ext4" and mount.option("data") not in (None, "ordered"):
            return Obstacle(f"ext4 with data={mount.option('data')}", "mount it with data=ordered")
    stack = _stack(system, volume)
    for layer in stack:
        if layer.kind != "nvme" and layer.kind != "md raid0":
            return Obstacle(f"{layer.name} ({layer.kind}) is no NVMe namespace", "put the volume on an NVMe drive, without layers between")
    controllers = _controllers(stack)
    for controller in controllers:
        if controller.transport not in ("pcie", "rdma"):
            return Obstacle(
                f"{controller.name} is reached by {controller.transport}, which cuFile does not know",
                f"nvme disconnect -d {controller.name} && nvme connect -t rdma ...   # needs RDMA NICs on both ends",
            )
    return None if controllers else Obstacle("no NVMe controller behind it is visible here")
