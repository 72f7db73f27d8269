"""NVIDIA's driver, its device nodes and its libraries, as far as files tell; and its GPUs, as the management library tells."""

import functools
import re
import sys
from dataclasses import dataclass

from offloadd.cuda.nvml import LIBRARY, GpuState, NvmlUnavailable, read_gpus
from offloadd.machine.system import System

_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
)


@dataclass(frozen=True, slots=True)
class Driver:
    """The kernel module that is loaded. `is_open` is None where its text says neither."""

    version: str
    is_open: bool | None

    @property
    def major(self) -> int:
        """The branch, such as 570."""
        return int(self.version.partition(".")[0])


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library. `version` is empty where neither its file's name nor a wheel tells."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Management:
    """What the management library told, or why it did not."""

    gpus: tuple[GpuState, ...]
    error: str = ""


def driver(system: System) -> Driver | None:
    """The loaded driver; None without one."""
    text = system.text("/proc/driver/nvidia/version")
    line = next((line for line in (text or "").splitlines() if line.startswith("NVRM version:")), "")
    match = re.search(r"\s([0-9]{2,4}(?:\.[0-9]+)+)\s", f"{line} ")
    if match is None:
        return None
    return Driver(version=match[1], is_open="Open Kernel Module" in line if "Kernel Module" in line else None)


def gpu_models(system: System) -> list[str]:
    """Model names of the GPUs that the driver holds, by PCI address."""
    models = []
    for address in system.names("/proc/driver/nvidia/gpus"):
        match = re.search(r"^Model:\s*(.*)$", system.text(f"/proc/driver/nvidia/gpus/{address}/information") or "", re.MULTILINE)
        models.append(match[1].strip() if match else "unknown model")
    return models


def gpu_nodes(system: System) -> list[str]:
    """Device nodes of GPUs: nvidia0, nvidia1…"""
    return [name for name in system.names("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]


def gpu_count(system: System) -> int:
    """GPUs that a process here could use."""
    return len(gpu_nodes(system)) if driver(system) is not None else 0


def library(system: System, name: str) -> Library | None:
    """The first file of that name where the loader, or Python's wheels, would find it."""
    searched = [entry for entry in system.environment.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]
    for file in system.names("/etc/ld.so.conf.d"):
        searched += [line.strip() for line in (system.text(f"/etc/ld.so.conf.d/{file}") or "").splitlines() if line.startswith("/")]
    searched += _LIBRARY_DIRECTORIES
    for directory in searched:
        if system.exists(f"{directory}/{name}"):
            match = re.search(r"\.so\.([0-9]+\.[0-9.]+)$", system.real(f"{directory}/{name}"))
            return Library(path=f"{directory}/{name}", version=match[1] if match else "")
    return _wheel(system, name)


def management(system: System) -> Management:
    """What the management library of this machine tells. It is asked once a process: to start it takes as long as a GPU takes to wake up."""
    found = library(system, LIBRARY)
    # Without a file where one is looked for, the loader may know of one: of the machine itself, not of a tree that stands in for it.
    return _ask(str(system.path(found.path)) if found is not None else LIBRARY if str(system.root) == "/" else f"{system.root}/{LIBRARY}")


@functools.cache
def _ask(name: str) -> Management:
    try:
        return Management(read_gpus(name))
    except NvmlUnavailable as error:
        return Management((), str(error))


def _wheel(system: System, name: str) -> Library | None:
    for entry in sys.path:
        for package in system.names(f"{entry}/nvidia") if entry.startswith("/") else ():
            path = f"{entry}/nvidia/{package}/lib/{name}"
            if system.exists(path):
                stem = name.removeprefix("lib").partition(".")[0]
                match = next((m for info in system.names(entry) if (m := re.fullmatch(rf"nvidia_{stem}\w*-([0-9.]+)\.dist-info", info))), None)
                return Library(path=path, version=match[1] if match else "")
    return None
