"""What the management library tells, over its stand-in: each GPU by UUID, who uses it, and what a context takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.cuda.compute_mode import ComputeMode
from offloadd.cuda.device import Device
from offloadd.cuda.nvml import LIBRARY, NOTHING_KNOWN, MemoryUse, NvmlUnavailable, read_gpus, read_memory_use
from offloadd.units import GIB, MIB

from ...standin.controls import BAR1_BYTES, Control
from .check_device import UUIDS, in_a_process

#: What the stand-in says that a context takes.
CONTEXT_BYTES = 300 * MIB


def test_every_gpu_is_told_by_its_uuid(control: Control) -> None:
    control.management.uncorrected_errors = 3
    control.management.mig = 1
    gpus = read_gpus()
    assert [gpu.uuid for gpu in gpus] == UUIDS
    assert [gpu.pci_bus_id for gpu in gpus] == ["00000000:10:00.0", "00000000:11:00.0"]
    first = gpus[0]
    assert (first.name, first.driver_version, first.compute_mode) == ("Stand-in GPU", "580.65.06", ComputeMode.DEFAULT)
    assert (first.mig, first.persistence, first.uncorrected_errors) == (True, True, 3)
    assert (first.memory_bytes, first.bar1_bytes, first.bar1_used_bytes) == (64 * GIB, BAR1_BYTES, 0)


def test_the_memory_of_this_process_is_told_on_the_gpu_that_it_uses(control: Control) -> None:
    before = read_memory_use(UUIDS[1])
    device = Device.open("cuda:1")
    try:
        used = read_memory_use(UUIDS[1])
        assert used.process_bytes[os.getpid()] == CONTEXT_BYTES
        assert used.grown_by(os.getpid(), before) == CONTEXT_BYTES
        assert os.getpid() not in read_gpus()[0].process_bytes
        # A container's mover is listed by its id on the host.
        control.management.pid_shift = 100_000
        assert read_memory_use(UUIDS[1]).grown_by(os.getpid(), before) == CONTEXT_BYTES
    finally:
        device.close()


@pytest.mark.parametrize(
    ("before", "after", "grown"),
    [
        (MemoryUse(10, {1: 5}), MemoryUse(17, {1: 5, 42: 7}), 7),
        (MemoryUse(10, {1: 5}), MemoryUse(17, {1: 5, 77: 6}), 6),
        # Two came, and neither is known to be this process: what all have more.
        (MemoryUse(10, {}), MemoryUse(30, {77: 6, 78: 9}), 20),
        (MemoryUse(10, {}), MemoryUse(8, {}), 0),
        (MemoryUse(10, {}), NOTHING_KNOWN, 0),
        (NOTHING_KNOWN, MemoryUse(8, {}), 0),
    ],
)
def test_what_a_process_has_taken_is_told_as_well_as_the_lists_allow(before: MemoryUse, after: MemoryUse, grown: int) -> None:
    assert after.grown_by(42, before) == grown


@pytest.mark.parametrize("call", ["BAR1MemoryInfo", "MigMode", "ComputeMode", "PersistenceMode", "TotalEccErrors", "MemoryInfo", "ComputeRunningProcesses"])
def test_what_a_gpu_does_not_tell_is_none_and_the_rest_is_told(control: Control, call: str) -> None:
    with control.fail(f"nvmlDeviceGet{call}", 3):
        gpu = read_gpus()[0]
    untold = {
        name
        for name in ("bar1_bytes", "bar1_used_bytes", "mig", "compute_mode", "persistence", "uncorrected_errors", "memory_bytes", "memory_used_bytes")
        if getattr(gpu, name) is None
    }
    assert (
        untold
        == {
            "BAR1MemoryInfo": {"bar1_bytes", "bar1_used_bytes"},
            "MigMode": {"mig"},
            "ComputeMode": {"compute_mode"},
            "PersistenceMode": {"persistence"},
            "TotalEccErrors": {"uncorrected_errors"},
            "MemoryInfo": {"memory_bytes", "memory_used_bytes"},
            "ComputeRunningProcesses": set(),
        }[call]
    )
    assert gpu.uuid == UUIDS[0]


def test_a_library_that_does_not_work_is_told(control: Control) -> None:
    with control.fail("nvmlInit", 9), pytest.raises(NvmlUnavailable, match=f"{LIBRARY}: Driver Not Loaded"):
        read_gpus()
    with control.fail("nvmlInit", 9):
        assert read_memory_use(UUIDS[0]) == NOTHING_KNOWN
    assert read_memory_use("GPU-00000000-0000-0000-0000-000000000000") == NOTHING_KNOWN


def test_a_library_or_package_that_is_missing_is_told(tmp_path: Path) -> None:
    code = """
import sys
from offloadd.cuda.nvml import NvmlUnavailable, read_gpus
for library in ("/nowhere/libnvidia-ml.so.1", "libnvidia-ml.so.1"):
    try:
        read_gpus(library)
    except NvmlUnavailable as error:
        print(error)
    sys.modules["pynvml"] = None
"""
    missing, package = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert missing.startswith("/nowhere/libnvidia-ml.so.1 can't be loaded")
    assert package.startswith("the Python package nvidia-ml-py can't be imported") and "cuda13" in package


# ---- compute mode and MPS ----

OPEN = """
from offloadd.cuda.device import Device
try:
    device = Device.open("cuda:0")
    print(device.compute_mode.name, device.uses_mps, device.pci_bus_id)
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(("mode", "mps"), [(ComputeMode.DEFAULT, False), (ComputeMode.DEFAULT, True), (ComputeMode.EXCLUSIVE_PROCESS, True)])
def test_a_gpu_that_mps_serves_is_shared_whatever_its_mode_lets_in(mode: ComputeMode, mps: bool, tmp_path: Path) -> None:
    control = Control.create(tmp_path / "control", compute_mode=mode, mps=mps)
    assert in_a_process(OPEN, control, tmp_path) == f"{mode.name} {mps} 0000:10:00.0\n"


def test_mps_does_not_lift_a_prohibition(tmp_path: Path) -> None:
    assert "PROHIBITED, so nobody can use it" in in_a_process(
        OPEN, Control.create(tmp_path / "control", compute_mode=ComputeMode.PROHIBITED, mps=True), tmp_path
    )


def test_an_exclusive_gpu_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    answer = in_a_process(OPEN, Control.create(tmp_path / "control", compute_mode=ComputeMode.EXCLUSIVE_PROCESS), tmp_path)
    assert all(text in answer for text in ("EXCLUSIVE_PROCESS", "MPS does not serve it", "nvidia-smi -c DEFAULT", "nvidia-cuda-mps-control -d"))
