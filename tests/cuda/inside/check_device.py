"""Opening a GPU: which one, whether it may be used, and what is said if not."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offloadd.cuda.compute_mode import ComputeMode
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError, available, load

from ...standin.controls import ComputeMode as StandinMode
from ...standin.controls import Control

UUIDS = [f"GPU-7374616e-6469-6e2d-6770-7500000000{number:02x}" for number in range(2)]


def in_a_process(code: str, control: Control, folder: Path) -> str:
    """The output of code that runs with a control block of its own."""
    environment = {**os.environ, "CUDA_STANDIN_CONTROL": str(control.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120, cwd=folder).stdout


def test_a_gpu_is_available(device: Device) -> None:
    assert available() == ""


@pytest.mark.parametrize(("selector", "number"), [("cuda:0", 0), ("cuda:1", 1), (UUIDS[1], 1), (UUIDS[0].upper(), 0), (UUIDS[1].replace("GPU", "MIG"), 1)])
def test_a_gpu_is_opened_by_number_or_uuid(selector: str, number: int) -> None:
    device = Device.open(selector)
    assert (device.ordinal, device.uuid, device.name, device.compute_mode) == (number, UUIDS[number], "Stand-in GPU", ComputeMode.DEFAULT)
    assert 0 < device.free_bytes() <= device.total_bytes and device.pitch_bytes_max == 2**31 - 1
    device.close()


@pytest.mark.parametrize("selector", ["cuda:2", "cuda:-1", "cuda:", "cuda:²", "cuda", "gpu:0", "", "GPU-7374616e", "GPU-00000000-0000-0000-0000-000000000000"])
def test_an_unknown_gpu_is_named_beside_those_that_exist(selector: str) -> None:
    with pytest.raises(CudaError) as raised:
        Device.open(selector)
    assert str(raised.value).startswith(f"open device {selector!r}: no such GPU")
    assert all(text in str(raised.value) for text in (f"cuda:0 {UUIDS[0]} Stand-in GPU 1 GiB", f"cuda:1 {UUIDS[1]}"))


@pytest.mark.parametrize("mode", [2, 3])
def test_a_compute_mode_that_keeps_the_engine_or_us_out_is_refused(mode: int, tmp_path: Path) -> None:
    code = "from offloadd.cuda.device import Device\ntry: Device.open('cuda:0')\nexcept OSError as error: print(error)"
    answer = in_a_process(code, Control.create(tmp_path / "control", compute_mode=StandinMode(mode)), tmp_path)
    assert f"open device 'cuda:0': its compute mode is {ComputeMode(mode).name}" in answer and "nvidia-smi -c DEFAULT" in answer


def test_no_gpu_is_told(tmp_path: Path) -> None:
    answer = in_a_process("from offloadd.cuda.driver import available; print(available())", Control.create(tmp_path / "control", device_count=0), tmp_path)
    assert answer.startswith("load the CUDA driver: CUDA_ERROR_NO_DEVICE")


def test_the_numa_node_is_that_of_the_pci_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:11:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("3\n")
    nodes = []
    for selector in ("cuda:1", "cuda:0"):
        device = Device.open(selector, root=tmp_path)
        nodes.append(device.numa_node)
        device.close()
    assert nodes == [3, -1]


def test_a_thread_uses_the_device_after_it_made_it_current(device: Device) -> None:
    answers = []

    def use() -> None:
        try:
            answers.append(int(load().cuMemGetInfo()[0]))
            device.make_current()
            answers.append(int(load().cuMemGetInfo()[0]))
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert answers == [201, 0]


def test_a_closed_device_is_not_used(control: Control) -> None:
    device = Device.open("cuda:0")
    device.close()
    device.close()
    with pytest.raises(ValueError, match=r"device cuda:0 .* is closed"):
        device.make_current()
    assert control.process().counters.held == {}


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetUuid",
        "cuDeviceGetName",
        "cuDeviceGetPCIBusId",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
    ],
)
def test_a_gpu_that_can_not_be_opened_leaves_nothing(control: Control, function: str) -> None:
    with control.fail(function, 999, times=1), pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        Device.open("cuda:0")
    assert control.process().counters.held == {}
