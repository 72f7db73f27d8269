"""GPU checks: the driver, its device nodes, and the library that talks to it."""

import os
from collections import Counter
from collections.abc import Iterator

from offloadd.doctor import nvidia, pci
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.subject import Machine
from offloadd.machine.system import System

NO_GPU = "no NVIDIA driver here: KV in host memory only"


def check_driver(system: System, machine: Machine) -> Iterator[Finding]:
    """Which driver is loaded, and whether its kernel module is the open one."""
    driver = nvidia.driver(system)
    if driver is not None:
        kind = {True: "open kernel module", False: "proprietary kernel module", None: "kernel module of unknown kind"}[driver.is_open]
        yield ok(f"{driver.version}, {kind}")
    elif gpus := pci.nvidia_gpus(system):
        yield warn(
            f"{len(gpus)} NVIDIA GPU(s) on the PCI bus ({gpus[0].address}), but no driver: only KV in host memory is served",
            "modprobe nvidia   # installed by: apt-get install nvidia-open",
        )
    elif nvidia.gpu_nodes(system):
        yield fail("device nodes of GPUs, but no driver: /proc/driver/nvidia/version is missing", "modprobe nvidia   # on the host")
    else:
        yield not_applicable(NO_GPU)


def check_devices(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the GPUs that the driver holds can be opened here."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    nodes, models = nvidia.gpu_nodes(system), nvidia.gpu_models(system)
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if not system.exists(f"/dev/{name}")]
    closed = [name for name in nodes if not os.access(system.path(f"/dev/{name}"), os.R_OK | os.W_OK)]
    mend = "docker run --gpus all ...   # or a device plugin" if system.in_container() else "nvidia-modprobe -c 0 -u"
    if not nodes:
        yield fail(f"the driver holds {len(models)} GPU(s), but /dev has no nvidia0, nvidia1…", mend)
    elif missing:
        yield fail(f"/dev/{missing[0]} is missing: CUDA can't start", mend)
    elif closed:
        yield fail(f"/dev/{closed[0]} may not be opened by uid {os.geteuid()}", "usermod -aG video USER   # or DeviceAllow= in the unit")
    else:
        count = ", ".join(f"{count} × {model}" for model, count in Counter(models).items())
        yield ok(f"{len(nodes)} visible; the driver holds {count or 'none that it names'}")


def check_libcuda(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the driver's library is there, and of the kernel module's version."""
    driver, library = nvidia.driver(system), nvidia.library(system, "libcuda.so.1")
    if driver is None and not nvidia.gpu_nodes(system):
        yield not_applicable(NO_GPU)
    elif library is None:
        # Measured: KvikIO imports without it, and then every transfer fails, of host buffers too.
        yield fail(
            "GPU device nodes, but no libcuda.so.1: every transfer of a GPU would fail",
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..." if system.in_container() else "apt-get install libnvidia-compute",
        )
    elif driver is not None and library.version and library.version != driver.version and "compat" not in library.path:
        yield warn(f"{library.path} is {library.version}, the kernel module {driver.version}", "reboot   # or reload the module: they must be of one version")
    else:
        yield ok(f"{library.path}{f', {library.version}' if library.version else ''}")
