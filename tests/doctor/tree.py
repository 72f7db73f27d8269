"""Machines as directory trees: the files of `/proc`, `/sys`, `/run`, `/etc` and `/dev` that a doctor reads, laid out as the kernel lays them out."""

import os
from collections import defaultdict
from pathlib import Path

from offloadd.doctor.finding import Finding, Level
from offloadd.doctor.messages import RunChecks
from offloadd.doctor.registry import MACHINE_CHECKS, VOLUME_CHECKS
from offloadd.doctor.settings import Settings, VolumeSettings
from offloadd.doctor.worker import run_checks
from offloadd.tiers.volume_file import format_volume
from offloadd.units import GIB, MIB

VOLUME = "/mnt/kv/volume0"


class Tree:
    """A machine under `root`: at first a virtual machine with one CPU node, 16 GiB, a virtio disk with ext4, and nothing of NVIDIA."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        self._mounts = ["27 1 254:0 / / rw,relatime - ext4 /dev/vda rw", "30 27 0:25 / /dev/shm rw - tmpfs tmpfs rw"]
        self.file("/proc/sys/kernel/osrelease", "6.8.0-50-generic")
        self.file("/proc/sys/net/core/wmem_max", "212992")
        self.file("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree:        15000000 kB\nMemAvailable:   15728640 kB")
        self.limits()
        self.file("/proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t0")
        self.file("/proc/self/cgroup", "0::/user.slice")
        self.file("/proc/modules", "virtio_blk 28672 1 - Live 0x0000000000000000\next4 1048576 1 - Live 0x0000000000000000")
        self.file("/proc/locks", "")
        self.file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0")
        self.file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0")
        self.file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force")
        self.nodes("10")
        self.directory("/run/udev")
        self.directory("/dev/shm")
        self.disk("vda", "254:0", "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda")
        self.mount()

    # Files

    def file(self, name: str, text: str) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return path

    def directory(self, name: str) -> Path:
        path = self.root / name.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def link(self, name: str, target: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target.lstrip("/"), path.parent))

    def remove(self, name: str) -> None:
        path = self.root / name.lstrip("/")
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    # The machine

    def limits(self, locked: str = "unlimited", files: str = "65536") -> None:
        self.file(
            "/proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max open files            {1024:<21}{files:<21}files     \n"
            f"Max locked memory         {locked:<21}{locked:<21}bytes     ",
        )

    def nodes(self, *distances: str) -> None:
        for node, row in enumerate(distances):
            self.file(f"/sys/devices/system/node/node{node}/distance", row)
            self.file(f"/sys/devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")
            self.file(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       8388608 kB")

    def mount(self, *lines: str) -> None:
        self._mounts += lines
        self.file("/proc/self/mountinfo", "\n".join(self._mounts))

    def mount_volume(self, number: str, kind: str = "xfs", options: str = "rw") -> None:
        self.mount(f"40 27 {number} / /mnt/kv rw,noatime - {kind} /dev/something {options}")

    # Disks

    def disk(self, name: str, number: str, directory: str) -> None:
        self.file(f"{directory}/dev", number)
        self.file(f"{directory}/queue/scheduler", "[none] mq-deadline")
        self.file(f"{directory}/queue/write_cache", "write back")
        self.file(f"{directory}/queue/rotational", "0")
        self.directory(f"{directory}/slaves")
        self.link(f"/sys/dev/block/{number}", directory)
        self.link(f"/sys/class/block/{name}", directory)

    def pci(self, address: str, node: int, vendor: str = "0x8086", kind: str = "0x010802", bridge: str = "0000:00:01.0") -> str:
        directory = f"/sys/devices/pci0000:00/{bridge}/{address}"
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            self.file(f"{directory}/{name}", text)
        self.link(f"/sys/bus/pci/devices/{address}", directory)
        if not (self.root / f"sys/bus/pci/devices/{bridge}").is_symlink():
            self.link(f"/sys/bus/pci/devices/{bridge}", f"/sys/devices/pci0000:00/{bridge}")
        return directory

    def local_nvme(self, name: str = "nvme0", number: str = "259:1", address: str = "0000:05:00.0", node: int = 0) -> None:
        """A drive without multipath: the disk hangs on its controller."""
        controller = f"{self.pci(address, node)}/nvme/{name}"
        self._controller(controller, name, "pcie", address, "live", {"numa_node": str(node)})
        self.disk(f"{name}n1", number, f"{controller}/{name}n1")
        self.link(f"{controller}/{name}n1/device", controller)

    def fabric_nvme(
        self, transport: str, *states: str, number: str = "259:2", fast_io_fail: str = "off", ctrl_loss: str = "600", ana_states: tuple[str, ...] = ()
    ) -> None:
        """A namespace with native multipath: the disk hangs on the subsystem; each state is one path."""
        subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys1"
        self.file(f"{subsystem}/iopolicy", "numa")
        self.disk("nvme1n1", number, f"{subsystem}/nvme1n1")
        self.link(f"{subsystem}/nvme1n1/device", subsystem)
        for index, state in enumerate(states):
            name = f"nvme{index + 1}"
            controller = f"/sys/devices/virtual/nvme-fabrics/ctl/{name}"
            tuning = {"fast_io_fail_tmo": fast_io_fail, "ctrl_loss_tmo": ctrl_loss, "numa_node": "-1"}
            self._controller(controller, name, transport, f"traddr=10.0.0.{index + 1},trsvcid=4420", state, tuning)
            self.file(f"{controller}/nvme1c{index + 1}n1/ana_state", ana_states[index] if ana_states else "optimized")
            self.link(f"{subsystem}/{name}", controller)

    def _controller(self, directory: str, name: str, transport: str, address: str, state: str, more: dict[str, str]) -> None:
        for key, text in {"transport": transport, "address": address, "state": state, **more}.items():
            self.file(f"{directory}/{key}", text)
        self.link(f"/sys/class/nvme/{name}", directory)

    def nic(self, name: str = "mlx5_0", address: str = "0000:07:00.0", node: int = 0) -> None:
        self.link(f"/sys/class/infiniband/{name}/device", self.pci(address, node, "0x15b3", "0x020700"))

    # NVIDIA

    def nvidia(self, version: str = "570.86.15", is_open: bool = True, gpus: tuple[int, ...] = (0,), libcuda: str | None = None) -> None:
        """A driver with one H100 for each NUMA node named."""
        kind = "Open Kernel Module for x86_64" if is_open else "x86_64 Kernel Module"
        self.file("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX {kind}  {version}  Release Build  (root@host)\nGCC version:  gcc version 12.3.0")
        self.file("/proc/driver/nvidia/params", 'RegistryDwords: ""')
        for name in ("nvidiactl", "nvidia-uvm"):
            self.file(f"/dev/{name}", "")
        for index, node in enumerate(gpus):
            address = f"0000:{0x40 + index:02x}:00.0"
            self.pci(address, node, "0x10de", "0x030200")
            self.file(f"/proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t {index}")
            self.file(f"/dev/nvidia{index}", "")
        library = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{libcuda or version}"
        self.file(library, "")
        self.link("/usr/lib/x86_64-linux-gnu/libcuda.so.1", library)
        self.file("/usr/local/cuda/lib64/libcufile.so.1.14.1", "")
        self.link("/usr/local/cuda/lib64/libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.1.14.1")

    def nvidia_fs(self, *hooks: str, errors: int = 0) -> None:
        self.file("/proc/modules", "nvidia_fs 311296 0 - Live 0x0000000000000000\nnvidia 9000000 1 - Live 0x0000000000000000")
        self.file("/proc/driver/nvidia-fs/version", "version: 2.25")
        self.file("/proc/driver/nvidia-fs/modules", "\n".join(f"{hook}: 1" for hook in hooks))
        self.file("/proc/driver/nvidia-fs/bridges", "")
        self.file(
            "/proc/driver/nvidia-fs/stats",
            "GDS Version: 1.14.0.31\nNVFS statistics(ver: 4.0)\nNVFS Driver(version: 2.25.7)\nMellanox PeerDirect Supported: True\n\n"
            f"Active Process: 0\nReads                : n=9 ok=9 err={errors} readMiB=9 io_state_err=0\nWrites               : n=0 ok=0 err=0 writeMiB=0",
        )
        self.file("/dev/nvidia-fs0", "")

    def p2pdma(self) -> None:
        """All that P2PDMA mode needs besides kernel and driver."""
        self.file("/sys/module/nvme_core/parameters/multipath", "N")
        self.file("/proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"')
        self.file("/etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}')
        self.file("/boot/config-6.8.0-50-generic", "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y")

    # Volumes

    def volume(self, name: str = VOLUME, size_bytes: int = 8 * MIB) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        format_volume(str(path), volume_bytes=size_bytes, slab_bytes=MIB, namespace_count=16)
        return path

    # Diagnosis

    def machine(self, **changes: object) -> "Found":
        """What the machine's checks find, in this process."""
        return self._found(settings(**changes), None)

    def of_volume(self, name: str = VOLUME, prewrite: bool = True, hangs: bool = False) -> "Found":
        """What one volume's checks find, in this process."""
        return self._found(settings(volumes=(VolumeSettings(path=name, io_threads=6, prewrite=prewrite),)), 0, hangs)

    def _found(self, chosen: Settings, volume_index: int | None, hangs: bool = False) -> "Found":
        task = RunChecks(root=str(self.root), environment=self.environment, settings=chosen, volume_index=volume_index, hangs=hangs)
        checks = MACHINE_CHECKS if volume_index is None else VOLUME_CHECKS
        return Found({check.name: checked.findings for check, checked in zip(checks, run_checks(task), strict=True)})


class Found(dict[str, list[Finding]]):
    """Findings by the name of their check."""

    def one(self, check: str) -> Finding:
        """The only finding of a check."""
        (finding,) = self[check]
        return finding

    def levels(self) -> dict[str, Level]:
        """The worst level of each check."""
        order = [Level.NOT_APPLICABLE, Level.OK, Level.WARN, Level.FAIL]
        return {check: max((finding.level for finding in findings), key=order.index) for check, findings in self.items()}

    def checks(self, level: Level) -> set[str]:
        """Checks whose worst finding has this level."""
        found = defaultdict(set)
        for check, worst in self.levels().items():
            found[worst].add(check)
        return found[level]


def settings(**changes: object) -> Settings:
    """A configuration with an arena of 1 GiB and no volume."""
    values: dict[str, object] = {
        "runtime_dir": "/run/offloadd",
        "arena_bytes": GIB,
        "huge_pages": "auto",
        "staging_slot_bytes": 8 * MIB,
        "index_bytes_max": 256 * MIB,
        "sessions_max": 256,
        "connections_max": 256,
        "memories_per_session_max": 512,
        "volumes": (),
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]
