"""GPUDirect Storage checks: nvidia-fs, PCI P2PDMA, libcufile and its configuration file."""

import re
from collections.abc import Iterator

from offloadd.doctor import nvidia
from offloadd.doctor.checks.gpu import NO_GPU
from offloadd.doctor.cufile_json import cufile_json_path, parse, section
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.gds import p2pdma_obstacle
from offloadd.doctor.subject import Machine
from offloadd.machine.gds_ways import NVFS, nvfs_hooks, nvfs_obstacle
from offloadd.machine.system import System


def check_nvidia_fs(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether nvidia-fs is loaded, what it hooks, and what it has failed at."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    obstacle = nvfs_obstacle(system)
    if obstacle is not None:
        if p2pdma_obstacle(system) is None:
            yield not_applicable(f"{obstacle.cause}; P2PDMA mode does without")
        else:
            yield warn(obstacle.cause, obstacle.mend)
        return
    stats = system.text(f"{NVFS}/stats") or ""
    match = re.search(r"NVFS Driver\(version: ([0-9.:]+)\)", stats)
    version = match[1] if match else (system.text(f"{NVFS}/version") or "unknown version").removeprefix("version: ")
    hooked = nvfs_hooks(system)
    if not hooked & {"nvme", "nvme_rdma"}:
        yield warn(
            f"{version} is loaded, but hooks neither nvme nor nvme_rdma: these drivers are not patched for it",
            "install DOCA or MLNX_OFED with NVMe support (--with-nvmf), then reboot",
        )
    else:
        yield ok(f"{version}, hooks {', '.join(sorted(hooked))}")
    failed = sum(int(count) for count in re.findall(r"^(?:Reads|Writes)\b.*?\berr=([0-9]+)", stats, re.MULTILINE))
    if failed:
        yield warn(f"{failed} transfers have failed since it was loaded", f"dmesg | grep -i nvfs; cat {NVFS}/stats")


def check_p2pdma(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether cuFile could do without nvidia-fs, on local drives."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    obstacle = p2pdma_obstacle(system)
    if obstacle is None:
        yield ok("kernel, driver and cufile.json allow it, for local NVMe drives")
    elif nvfs_obstacle(system) is None:
        yield not_applicable(f"{obstacle.cause}; nvidia-fs does without")
    else:
        yield warn(obstacle.cause, obstacle.mend)


def check_libcufile(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether libcufile is there."""
    library = nvidia.library(system, "libcufile.so.0")
    if library is not None:
        yield ok(f"{library.path}{f', {library.version}' if library.version else ''}")
    elif nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
    else:
        yield warn("no libcufile.so.0: gds is not available", "pip install 'offloadd[cuda13]'")


def check_cufile_json(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether cuFile's configuration file can be read, and what it says about falling back."""
    path = cufile_json_path(system)
    named = "CUFILE_ENV_PATH_JSON" in system.environment
    if nvidia.driver(system) is None and not system.exists(path):
        yield not_applicable(NO_GPU)
        return
    text = system.text(path)
    if text is None:
        if named:
            yield fail(f"CUFILE_ENV_PATH_JSON names {path}, which can't be read", "unset CUFILE_ENV_PATH_JSON   # or make the file")
        else:
            yield ok(f"no {path}: cuFile's defaults hold")
        return
    try:
        values = parse(text)
    except ValueError as error:
        finding = fail if nvidia.driver(system) is not None else warn
        yield finding(f"{path} is no JSON: {error}; cuFile refuses to start", f"$EDITOR {path}")
        return
    yield ok(f"{path} is valid")
    if section(values, "properties").get("allow_compat_mode", True) is False:
        yield ok("allow_compat_mode is false: cuFile fails instead of bouncing")
    else:
        yield ok("allow_compat_mode is true: cuFile bounces where gds is not possible, and only its counters tell")
    level = str(section(values, "logging").get("level", "ERROR")).upper()
    if level in ("TRACE", "DEBUG", "INFO"):
        yield warn(f"logging.level is {level}: cuFile writes lines for every transfer", f'set logging.level to "ERROR" in {path}')
