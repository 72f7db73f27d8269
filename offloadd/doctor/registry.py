"""All checks, in the order of the table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from offloadd.doctor.checks import container, daemon, device, gds, gpu, gpu_state, memory, topology, volume
from offloadd.doctor.finding import Finding
from offloadd.doctor.subject import Machine, Volume
from offloadd.machine.system import System

Subject = TypeVar("Subject", Machine, Volume)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """`asks`: what it asks that may hang; once that was seen to, the checks that ask it are left out. Of one subject's checks all ask the same."""

    name: str
    group: str
    function: Callable[[System, Subject], Iterator[Finding]]
    asks: str = ""


_NVML, _VOLUME = "the management library", "the volume"

MACHINE_CHECKS: tuple[Check[Machine], ...] = (
    Check("config", "daemon", daemon.check_config),
    Check("runtime dir", "daemon", daemon.check_runtime_dir),
    Check("lock", "daemon", daemon.check_lock),
    Check("free", "memory", memory.check_free),
    Check("memlock", "memory", memory.check_memlock),
    Check("huge pages", "memory", memory.check_huge_pages),
    Check("copies", "memory", memory.check_copies),
    Check("open files", "memory", memory.check_files),
    Check("sockets", "memory", memory.check_sockets),
    Check("driver", "gpu", gpu.check_driver),
    Check("devices", "gpu", gpu.check_devices),
    Check("libcuda", "gpu", gpu.check_libcuda),
    Check("nvml", "gpu", gpu_state.check_nvml, asks=_NVML),
    Check("compute mode", "gpu", gpu_state.check_compute_mode, asks=_NVML),
    Check("mps", "gpu", gpu_state.check_mps),
    Check("bar1", "gpu", gpu_state.check_bar1, asks=_NVML),
    Check("gpu memory", "gpu", gpu_state.check_memory, asks=_NVML),
    Check("mig", "gpu", gpu_state.check_mig, asks=_NVML),
    Check("persistence", "gpu", gpu_state.check_persistence, asks=_NVML),
    Check("ecc", "gpu", gpu_state.check_ecc, asks=_NVML),
    Check("nvidia-fs", "gds", gds.check_nvidia_fs),
    Check("p2pdma", "gds", gds.check_p2pdma),
    Check("libcufile", "gds", gds.check_libcufile),
    Check("cufile.json", "gds", gds.check_cufile_json),
    Check("udev", "container", container.check_udev),
    Check("modules", "container", container.check_modules_file),
    Check("shm", "container", container.check_shm),
    Check("seccomp", "container", container.check_seccomp),
    Check("numa", "topology", topology.check_numa),
    Check("iommu", "topology", topology.check_iommu),
    Check("acs", "topology", topology.check_acs),
)

#: The group of a volume's findings is `volume PATH`. Checks that ask the volume come first: what they find says how to read the others.
VOLUME_CHECKS: tuple[Check[Volume], ...] = (
    Check("file", "volume", volume.check_file, asks=_VOLUME),
    Check("superblock", "volume", volume.check_superblock, asks=_VOLUME),
    Check("direct I/O", "volume", volume.check_direct_io, asks=_VOLUME),
    Check("space", "volume", volume.check_space, asks=_VOLUME),
    Check("file system", "volume", device.check_file_system),
    Check("stack", "volume", device.check_stack),
    Check("paths", "volume", device.check_paths),
    Check("timeouts", "volume", device.check_timeouts),
    Check("multipath", "volume", device.check_multipath),
    Check("queue", "volume", device.check_queue),
    Check("distance", "volume", device.check_distance),
    Check("gds mode", "volume", device.check_gds_mode),
)
