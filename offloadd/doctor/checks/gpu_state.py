"""Checks of what the management library knows of each GPU: who may use it, how much of it is left, and how it is set."""

from collections.abc import Callable, Iterator

import msgspec

from offloadd.cuda.compute_mode import ComputeMode
from offloadd.cuda.nvml import LIBRARY, PACKAGE, GpuState
from offloadd.doctor import nvidia
from offloadd.doctor.checks.gpu import NO_GPU
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.mps import VARIABLE, mps
from offloadd.doctor.subject import Machine
from offloadd.machine.system import System
from offloadd.units import MIB, format_bytes

#: Assumed of a mover's CUDA context with its kernels, on top of staging slots. `offloadd status` tells what one really took.
CONTEXT_BYTES = 512 * MIB
NOT_ASKED = "the management library was not asked: see nvml"
#: In a command, after -i: which GPUs it is for.
_INDEX = "{index}"


def check_nvml(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the management library answers, and which GPUs it sees."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    management = nvidia.management(system)
    if management.error:
        if PACKAGE in management.error:
            mend = "pip install 'offloadd[cuda13]'   # or [cuda12]"
        elif nvidia.library(system, LIBRARY) is not None:
            mend = "nvidia-smi   # says more; a reboot mends a driver that was replaced while it ran"
        elif system.in_container():
            mend = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        else:
            mend = "apt-get install libnvidia-compute"
        yield warn(f"{management.error}: modes and memory of the GPUs are not checked", mend)
        return
    for index, gpu in enumerate(management.gpus):
        yield ok(f"GPU {index}: {gpu.name}, {gpu.uuid}, at {gpu.pci_bus_id}, driver {gpu.driver_version}")


def check_compute_mode(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether a mover and an engine can both have a context."""
    served = mps(system, machine.settings.runtime_dir)

    def judge(gpu: GpuState) -> Finding:
        if gpu.compute_mode is None:
            return not_applicable("it tells no compute mode")
        name = gpu.compute_mode.name
        if gpu.compute_mode == ComputeMode.PROHIBITED:
            return fail(f"compute mode {name}: nobody can use it", f"nvidia-smi -i {_INDEX} -c DEFAULT")
        if not gpu.compute_mode.is_exclusive:
            return ok(f"compute mode {name}: engines and the daemon share it")
        if served.answers:
            return ok(f"compute mode {name}, and MPS serves: engines and the daemon are clients of its server")
        return fail(
            f"compute mode {name} lets one process in, the engine or the daemon, and no MPS answers in {served.directory}",
            f"nvidia-smi -i {_INDEX} -c DEFAULT   # or, for both as one user: nvidia-cuda-mps-control -d",
        )

    yield from _each(system, judge)


def check_mps(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether engine and mover run their kernels side by side or in turns."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    found = mps(system, machine.settings.runtime_dir)
    where = f"{found.directory} ({VARIABLE} of {found.told_by})" if found.told_by else found.directory
    start = f"{VARIABLE}={found.directory} nvidia-cuda-mps-control -d" if found.told_by else "nvidia-cuda-mps-control -d"
    if found.answers:
        yield ok(
            f"a control daemon answers in {where}: kernels of engines and movers share the SMs instead of time-slicing; "
            "all must run as one user, and a fault of one ends the others"
        )
    elif found.others:
        yield warn(
            f"a control daemon runs (pid {', '.join(found.others)}), but not for {where}: the daemon starts without MPS",
            f"Environment={VARIABLE}=...   # in the unit: the directory of that control daemon, tr '\\0' '\\n' < /proc/{found.others[0]}/environ",
        )
    elif found.has_socket:
        yield warn(f"{found.directory}/control is there, but nobody answers: CUDA starts without MPS", start)
    elif found.told_by:
        yield warn(f"no control daemon in {where}: CUDA starts without MPS", start)
    else:
        yield ok(f"not used (no control daemon in {where}): kernels of engine and mover take turns on a GPU; copies by its copy engines do not")


def check_bar1(system: System, machine: Machine) -> Iterator[Finding]:
    """cuFile registers each staging slot of `gds` in BAR1, through which the storage reaches it."""
    settings = machine.settings
    need = settings.staging_bytes(1)
    threads = sum(volume.io_threads for volume in settings.volumes)
    slots = f"staging slots of gds take {format_bytes(need)} ({threads} threads, {format_bytes(settings.staging_slot_bytes)} each)"
    mend = f"set a smaller mover.staging_slot_bytes or volume.io_threads   # nvidia-smi -q -i {_INDEX} -d MEMORY; firmware: Above 4G Decoding, Resizable BAR"

    def judge(gpu: GpuState) -> Finding:
        if gpu.bar1_bytes is None or gpu.bar1_used_bytes is None:
            return not_applicable("it tells no size of BAR1")
        free = gpu.bar1_bytes - gpu.bar1_used_bytes
        text = f"{slots}; BAR1 has {format_bytes(gpu.bar1_bytes)}"
        if need > gpu.bar1_bytes:
            return warn(f"{text}: volumes without room go by bounce", mend)
        if need > free and not _movers(system, gpu):
            return warn(f"{text}, {format_bytes(free)} of it free: volumes without room go by bounce", mend)
        return ok(f"{text}, {format_bytes(free)} of it free")

    if need:
        yield from _each(system, judge)
    else:
        yield not_applicable("no volume is configured, so nothing is registered")


def check_memory(system: System, machine: Machine) -> Iterator[Finding]:
    """What movers take of a GPU's memory, or whether there is room for one."""
    need = CONTEXT_BYTES + machine.settings.staging_bytes(1)

    def judge(gpu: GpuState) -> Finding:
        if gpu.memory_bytes is None or gpu.memory_used_bytes is None:
            return not_applicable("it tells no size of its memory")
        free = gpu.memory_bytes - gpu.memory_used_bytes
        text = f"{format_bytes(gpu.memory_used_bytes)} of {format_bytes(gpu.memory_bytes)} used by {_processes(len(gpu.process_bytes))}"
        movers = _movers(system, gpu)
        if movers:
            parts = ", ".join(f"pid {pid} {format_bytes(gpu.process_bytes[pid])}" for pid in movers)
            return ok(f"{text}; of them offloadd's mover (context and staging slots): {parts}")
        if free < need:
            return warn(
                f"{text}, {format_bytes(free)} are free; a mover takes about {format_bytes(need)} (context {format_bytes(CONTEXT_BYTES)}, and staging slots)",
                "start the daemon before the engine, or leave it room   # vLLM: a smaller --gpu-memory-utilization",
            )
        return ok(f"{text}; a mover takes about {format_bytes(need)}")

    yield from _each(system, judge)


def check_mig(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether a GPU is split into instances, which have UUIDs of their own."""

    def judge(gpu: GpuState) -> Finding:
        if gpu.mig is None:
            return not_applicable("it has no MIG")
        if gpu.mig:
            return warn(
                "MIG is on: CUDA sees instances, each of which needs a mover of its own, and the default of gpu.devices names whole GPUs",
                f"nvidia-smi -L   # name the MIG-... UUIDs in gpu.devices; or: nvidia-smi -i {_INDEX} -mig 0",
            )
        return ok("MIG is off")

    yield from _each(system, judge)


def check_persistence(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether the driver keeps a GPU ready when nobody uses it."""

    def judge(gpu: GpuState) -> Finding:
        if gpu.persistence is None:
            return not_applicable("it tells no persistence mode")
        if gpu.persistence:
            return ok("persistence mode is on")
        return warn(
            "persistence mode is off: the driver lets the GPU go when its last process ends, and the next start takes seconds",
            f"systemctl enable --now nvidia-persistenced   # or: nvidia-smi -i {_INDEX} -pm 1",
        )

    yield from _each(system, judge)


def check_ecc(system: System, machine: Machine) -> Iterator[Finding]:
    """Whether memory of a GPU has lost bits. Blocks are verified by their checksums; an engine's own memory is not."""

    def judge(gpu: GpuState) -> Finding:
        if gpu.uncorrected_errors is None:
            return not_applicable("it has no ECC, or it is off")
        if gpu.uncorrected_errors:
            return warn(
                f"{gpu.uncorrected_errors} uncorrected memory errors since the driver was loaded",
                f"nvidia-smi -q -i {_INDEX} -d ECC,ROW_REMAPPER   # then reset or replace it",
            )
        return ok("no uncorrected memory error since the driver was loaded")

    yield from _each(system, judge)


def _each(system: System, judge: Callable[[GpuState], Finding]) -> Iterator[Finding]:
    """A finding for each GPU; one for all of which the same is said."""
    if nvidia.driver(system) is None:
        yield not_applicable(NO_GPU)
        return
    indices: dict[Finding, list[int]] = {}
    for index, gpu in enumerate(nvidia.management(system).gpus):
        indices.setdefault(judge(gpu), []).append(index)
    if not indices:
        yield not_applicable(NOT_ASKED)
    count = sum(map(len, indices.values()))
    for finding, mine in indices.items():
        names = ",".join(map(str, mine))
        # Without -i the command is for all GPUs.
        mend = finding.mend.replace(f"-i {_INDEX} ", f"-i {names} " if len(mine) < count or count == 1 else "")
        yield msgspec.structs.replace(finding, cause=f"GPU {names.replace(',', ', ')}: {finding.cause}", mend=mend)


def _movers(system: System, gpu: GpuState) -> list[int]:
    """Process ids of movers among those that use a GPU; none are found from inside a container, where the library tells the host's ids."""
    found = []
    for pid in gpu.process_bytes:
        try:
            command = system.text(f"/proc/{pid}/cmdline") or ""
        except OSError:
            # The process ended while its file was read.
            continue
        if "offloadd.mover" in command:
            found.append(pid)
    return found


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
