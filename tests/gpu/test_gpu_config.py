"""Which GPUs the daemon serves: those of the configuration, else those that the driver shows in this container."""

from pathlib import Path

import pytest

from offloadd.config import load_config
from offloadd.config.gpus import gpus_present
from offloadd.errors import ConfigError

UUIDS = [f"GPU-{number}0000000-aaaa-bbbb-cccc-dddddddddddd" for number in range(3)]


def information(root: Path, bus: str, text: str) -> Path:
    """What the driver writes of one GPU."""
    path = root / "proc/driver/nvidia/gpus" / bus / "information"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def gpu(root: Path, bus: str, uuid: str, minor: int, *, node: bool = True) -> Path:
    if node:
        (root / "dev").mkdir(exist_ok=True)
        (root / f"dev/nvidia{minor}").touch()
    return information(
        root, bus, f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 61\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"
    )


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    assert gpus_present(tmp_path) == ()


def test_gpus_are_found_in_the_order_of_their_device_nodes(tmp_path: Path) -> None:
    # Neither the order of the bus nor that of text.
    gpu(tmp_path, "0000:01:00.0", UUIDS[0], 10)
    gpu(tmp_path, "0000:02:00.0", UUIDS[1], 0)
    gpu(tmp_path, "0000:03:00.0", UUIDS[2], 2)
    assert gpus_present(tmp_path) == (UUIDS[1], UUIDS[2], UUIDS[0])


def test_a_gpu_whose_device_node_the_container_does_not_have_is_not_there(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0", UUIDS[0], 0, node=False)
    gpu(tmp_path, "0000:02:00.0", UUIDS[1], 1)
    (tmp_path / "dev/nvidia-uvm").touch()
    assert gpus_present(tmp_path) == (UUIDS[1],)


def test_what_can_not_be_read_or_understood_is_left_out(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0", UUIDS[0], 0)
    gpu(tmp_path, "0000:02:00.0", "GPU-????????-????-????-????-????????????", 1)
    information(tmp_path, "0000:03:00.0", f"GPU UUID: {UUIDS[2]}\n")
    information(tmp_path, "0000:04:00.0", "\udcff".encode(errors="surrogateescape").decode("latin-1"))
    (tmp_path / "proc/driver/nvidia/gpus/0000:05:00.0/information").mkdir(parents=True)
    assert gpus_present(tmp_path) == (UUIDS[0],)


def load(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "offloadd.toml"
    path.write_text(text)
    return load_config(path).gpu.devices


def test_gpus_are_named_by_number_or_by_uuid(tmp_path: Path) -> None:
    names = ("cuda:0", "cuda:15", UUIDS[0], UUIDS[1].replace("GPU", "MIG"))
    assert load(tmp_path, f"[gpu]\ndevices = {list(names)}") == names


def test_no_gpus_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(tmp_path, "[gpu]\ndevices = []") == ()


@pytest.mark.parametrize("name", ["cuda", "cuda:", "cuda:-1", "cuda:0 ", "cuda:0x1", "cuda:1000", "cuda:\u0663", "0", "", "host", "GPU-", "GPU-xyz", "GPU-0\n"])
def test_a_name_that_is_no_gpu_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.devices\[0\]"):
        load(tmp_path, f"[gpu]\ndevices = [{name!r}]".replace("'", '"'))


def test_a_gpu_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"devices is \['cuda:1', 'cuda:0', 'cuda:1'\]; each GPU may stand there once"):
        load(tmp_path, "[gpu]\ndevices = ['cuda:1', 'cuda:0', 'cuda:1']")


def test_more_gpus_than_a_node_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64"):
        load(tmp_path, f"[gpu]\ndevices = {[f'cuda:{number}' for number in range(65)]}")


def test_devices_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.devices"):
        load(tmp_path, "[gpu]\ndevices = 'cuda:0'")
