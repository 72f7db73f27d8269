"""What the management library tells of GPUs, as findings: over its stand-in, which lies in the tree as the real one lies on a machine."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from offloadd.cli.doctor import values_of
from offloadd.doctor import Diagnosis, Finding, Level, diagnose
from offloadd.doctor.messages import Checked, RunChecks
from offloadd.doctor.process import WorkerProcess
from offloadd.doctor.registry import MACHINE_CHECKS
from offloadd.doctor.settings import VolumeSettings
from offloadd.units import MIB

from ..standin.block import ComputeMode
from ..standin.build import Paths, build, compiler
from ..standin.controls import Control, environment
from ..standin_tests.child import PRELUDE, Child
from ..standin_tests.conftest import needs
from .test_diagnosis import config_file
from .tree import VOLUME, Tree, settings

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CHECKS = ("nvml", "compute mode", "mps", "bar1", "gpu memory", "mig", "persistence", "ecc")


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    return build(tmp_path_factory.mktemp("standin"))


class GpuMachine:
    """A tree with two GPUs, and the stand-in for the management library in it."""

    def __init__(self, tree: Tree, control: Control, paths: Paths) -> None:
        self.tree, self.control, self.paths = tree, control, paths
        tree.nvidia(gpus=(0, 0))
        tree.volume()
        # The management library's stand-in needs that of the driver beside it.
        shutil.copyfile(paths.libcuda, tree.root / f"{LIBRARIES}/libcuda.so.570.86.15".lstrip("/"))
        shutil.copyfile(paths.libnvml, tree.root / f"{LIBRARIES}/libnvidia-ml.so.1".lstrip("/"))
        self.environment: dict[str, str] = {}

    def all(self) -> dict[str, list[Finding]]:
        """What the checks of this file find, by their names: in a process of theirs, since a process keeps the library that it has loaded."""
        first = next(number for number, check in enumerate(MACHINE_CHECKS) if check.name == CHECKS[0])
        chosen = settings(volumes=(VolumeSettings(path=VOLUME, io_threads=8, prewrite=True),))
        task = RunChecks(root=str(self.tree.root), environment=self.environment, settings=chosen, first=first)
        with WorkerProcess(task, limit_s=60) as worker:
            return {check: msgspec.json.decode(worker.line(), type=Checked).findings for check in CHECKS}

    def findings(self, check: str) -> list[Finding]:
        return self.all()[check]

    def one(self, check: str) -> Finding:
        (finding,) = self.findings(check)
        return finding


@pytest.fixture
def machine(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuMachine]:
    needs("pynvml")
    control = Control.create(tmp_path / "control")
    monkeypatch.setenv("CUDA_STANDIN_CONTROL", str(control.path))
    # A socket's path has 107 characters at most, and those of the tests' own directory may be more.
    folder = Path(tempfile.mkdtemp(prefix="ofl-"))
    yield GpuMachine(Tree(folder / "root"), control, paths)
    shutil.rmtree(folder)


def test_a_well_set_machine_has_nothing_to_mend(machine: GpuMachine) -> None:
    found = {check: findings[0] for check, findings in machine.all().items()}
    assert [finding.cause for finding in machine.findings("nvml")] == [
        f"GPU {index}: Stand-in GPU, GPU-7374616e-6469-6e2d-6770-75000000000{index}, at 00000000:{bus}:00.0, driver 580.65.06"
        for index, bus in enumerate(("10", "11"))
    ]
    assert {finding.level for finding in found.values()} == {Level.OK}
    # All of it is in the JSON.
    values = values_of(Diagnosis(tuple(found.values())))["findings"]
    assert [value["cause"] for value in values] == [finding.cause for finding in found.values()]
    # What is the same of all GPUs is said once.
    assert found["compute mode"].cause == "GPU 0, 1: compute mode DEFAULT: engines and the daemon share it"
    assert found["bar1"].cause == ("GPU 0, 1: staging slots of gds take 64 MiB (8 threads, 8 MiB each); BAR1 has 64 GiB, 64 GiB of it free")
    assert found["gpu memory"].cause == "GPU 0, 1: 0 B of 64 GiB used by 0 processes; a mover takes about 576 MiB"
    assert found["mig"].cause == "GPU 0, 1: MIG is off"
    assert found["persistence"].cause == "GPU 0, 1: persistence mode is on"
    assert found["ecc"].cause == "GPU 0, 1: no uncorrected memory error since the driver was loaded"
    assert "kernels of engine and mover take turns" in found["mps"].cause


def test_a_prohibited_gpu_fails(machine: GpuMachine) -> None:
    machine.control.compute_mode = ComputeMode.PROHIBITED
    finding = machine.one("compute mode")
    assert (finding.level, finding.cause) == (Level.FAIL, "GPU 0, 1: compute mode PROHIBITED: nobody can use it")
    assert finding.mend == "nvidia-smi -c DEFAULT"


def test_an_exclusive_gpu_fails_without_mps_and_is_fine_with_it(machine: GpuMachine) -> None:
    machine.control.compute_mode = ComputeMode.EXCLUSIVE_PROCESS
    finding = machine.one("compute mode")
    assert finding.level is Level.FAIL
    assert "EXCLUSIVE_PROCESS lets one process in" in finding.cause and "no MPS answers in /tmp/nvidia-mps" in finding.cause
    assert "-c DEFAULT" in finding.mend
    with listening(machine.tree, "/tmp/nvidia-mps"):
        finding = machine.one("compute mode")
        assert (finding.level, "MPS serves" in finding.cause) == (Level.OK, True)


# ---- MPS ----


def listening(tree: Tree, directory: str) -> socket.socket:
    """A control daemon's socket."""
    tree.directory(directory)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(tree.root / directory.lstrip("/") / "control"))
    sock.listen()
    return sock


def test_what_mps_changes_is_said_where_it_serves(machine: GpuMachine) -> None:
    with listening(machine.tree, "/tmp/nvidia-mps"):
        finding = machine.one("mps")
    assert finding.level is Level.OK
    assert all(text in finding.cause for text in ("/tmp/nvidia-mps", "share the SMs instead of time-slicing", "one user", "a fault of one ends the others"))


def test_a_control_daemon_that_has_gone_is_not_taken_for_one(machine: GpuMachine) -> None:
    listening(machine.tree, "/tmp/nvidia-mps").close()
    finding = machine.one("mps")
    assert (finding.level, finding.mend) == (Level.WARN, "nvidia-cuda-mps-control -d")
    assert finding.cause == "/tmp/nvidia-mps/control is there, but nobody answers: CUDA starts without MPS"


def test_the_pipe_directory_is_that_of_the_environment(machine: GpuMachine) -> None:
    machine.environment["CUDA_MPS_PIPE_DIRECTORY"] = "/run/mps"
    finding = machine.one("mps")
    assert finding.level is Level.WARN
    assert finding.cause == "no control daemon in /run/mps (CUDA_MPS_PIPE_DIRECTORY of this shell): CUDA starts without MPS"
    assert finding.mend == "CUDA_MPS_PIPE_DIRECTORY=/run/mps nvidia-cuda-mps-control -d"
    with listening(machine.tree, "/run/mps"):
        assert machine.one("mps").level is Level.OK


def test_the_environment_of_a_running_daemon_counts_more_than_the_shells(machine: GpuMachine) -> None:
    tree = machine.tree
    lock = tree.file("/run/offloadd/lock", "4711")
    status = lock.stat()
    tree.file("/proc/locks", f"1: FLOCK  ADVISORY  WRITE 4711 {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} 0 EOF")
    tree.file("/proc/4711/environ", "PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY=/srv/mps\0HOME=/")
    machine.environment["CUDA_MPS_PIPE_DIRECTORY"] = "/run/mps"
    assert machine.one("mps").cause.startswith("no control daemon in /srv/mps (CUDA_MPS_PIPE_DIRECTORY of the daemon, pid 4711)")


def test_a_control_daemon_of_another_directory_is_named(machine: GpuMachine) -> None:
    machine.tree.file("/proc/77/cmdline", "/usr/bin/nvidia-cuda-mps-control\0-d")
    finding = machine.one("mps")
    assert finding.level is Level.WARN
    assert "a control daemon runs (pid 77), but not for /tmp/nvidia-mps" in finding.cause
    assert "/proc/77/environ" in finding.mend


# ---- memory ----


def test_staging_slots_that_bar1_has_no_room_for_are_a_warning_with_the_figures(machine: GpuMachine) -> None:
    machine.control.management.bar1_bytes = 32 * MIB
    finding = machine.one("bar1")
    assert finding.level is Level.WARN
    assert finding.cause == ("GPU 0, 1: staging slots of gds take 64 MiB (8 threads, 8 MiB each); BAR1 has 32 MiB: volumes without room go by bounce")
    assert "mover.staging_slot_bytes" in finding.mend


@pytest.fixture
def holder(machine: GpuMachine) -> Iterator[Child]:
    """A process with a context on the first GPU."""
    needs("cuda.bindings")
    child = Child(environment(machine.paths, machine.control))
    child.run(PRELUDE)
    child.run(f"device = device_context(); memory = ok(cu.cuMemAlloc({40 * MIB}))")
    yield child
    child.close()


def test_memory_of_a_mover_is_told_apart_from_that_of_engines(machine: GpuMachine, holder: Child) -> None:
    first, second = machine.findings("gpu memory")
    assert first.cause == "GPU 0: 340 MiB of 64 GiB used by 1 process; a mover takes about 576 MiB"
    assert second.cause.startswith("GPU 1: 0 B of 64 GiB used")
    machine.tree.file(f"/proc/{holder.pid}/cmdline", "python\0-m\0offloadd.mover.main\0--fd\0" + "5\0--device\0cuda:0")
    first, _ = machine.findings("gpu memory")
    assert first.level is Level.OK
    assert first.cause.endswith(f"of them offloadd's mover (context and staging slots): pid {holder.pid} 340 MiB")


def test_a_gpu_without_room_for_a_mover_is_a_warning(machine: GpuMachine) -> None:
    machine.control.management.others_bytes = (64 << 30) - 100 * MIB
    finding = machine.one("gpu memory")
    assert finding.level is Level.WARN
    assert "100 MiB are free; a mover takes about 576 MiB (context 512 MiB, and staging slots)" in finding.cause
    assert "start the daemon before the engine" in finding.mend


def test_settings_that_cost_something_are_warnings(machine: GpuMachine) -> None:
    management = machine.control.management
    management.mig, management.persistence, management.uncorrected_errors = 1, 0, 7
    found = {check: findings[0] for check, findings in machine.all().items()}
    assert {found[check].level for check in ("mig", "persistence", "ecc")} == {Level.WARN}
    assert "MIG is on" in found["mig"].cause
    assert found["mig"].mend == "nvidia-smi -L   # name the MIG-... UUIDs in gpu.devices; or: nvidia-smi -mig 0"
    assert "nvidia-persistenced" in found["persistence"].mend
    assert "7 uncorrected memory errors" in found["ecc"].cause


def test_what_a_gpu_does_not_tell_does_not_apply(machine: GpuMachine) -> None:
    for call in ("BAR1MemoryInfo", "MigMode", "ComputeMode", "PersistenceMode", "TotalEccErrors", "MemoryInfo"):
        machine.control.fail(f"nvmlDeviceGet{call}", 3)
    found = machine.all()
    assert {check for check in CHECKS if {finding.level for finding in found[check]} == {Level.NOT_APPLICABLE}} == set(CHECKS) - {"nvml", "mps"}


# ---- no library ----


def test_a_library_that_does_not_answer_is_a_warning_and_not_more(machine: GpuMachine) -> None:
    machine.control.fail("nvmlInit", 18)
    found = machine.all()
    (finding,) = found["nvml"]
    assert finding.level is Level.WARN and "RM has detected an NVML/RM version mismatch" in finding.cause and "reboot" in finding.mend
    others = [finding.cause for check in CHECKS if check not in ("nvml", "mps") for finding in found[check]]
    assert set(others) == {"the management library was not asked: see nvml"}


@pytest.mark.parametrize(("container", "mend"), [(False, "apt-get install libnvidia-compute"), (True, "NVIDIA_DRIVER_CAPABILITIES=compute,utility")])
def test_a_machine_without_the_library_is_told_how_to_get_it(tree: Tree, container: bool, mend: str) -> None:
    tree.nvidia()
    if container:
        tree.file("/.dockerenv", "")
    finding = tree.machine().one("nvml")
    assert finding.level is Level.WARN and "libnvidia-ml.so.1 can't be loaded" in finding.cause and mend in finding.mend


def test_a_library_that_hangs_costs_its_checks_and_no_others(machine: GpuMachine) -> None:
    with machine.control.hang("nvmlInit"):
        diagnosis = diagnose(config_file(machine.tree, VOLUME), root=machine.tree.root, environment={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, limit_s=6)
    found = {finding.check: finding for finding in diagnosis.findings}
    assert (found["nvml"].level, found["nvml"].cause) == (Level.FAIL, "no answer within 6 s: the management library hangs")
    # Asked once: a minute of waiting would say no more.
    assert {found[check].cause for check in CHECKS if check not in ("nvml", "mps")} == {"not tried: the management library hangs"}
    assert found["libcufile"].level is Level.OK
    # Of the whole round, this is what a check gets of the environment.
    assert "/run/mps (CUDA_MPS_PIPE_DIRECTORY of this shell)" in found["mps"].cause
