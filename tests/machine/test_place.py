"""What the log says of the NVMe controllers behind a volume, from sysfs alone."""

from pathlib import Path

import pytest

from offloadd.machine.place import nvme_paths
from offloadd.machine.system import System

from ..doctor.tree import VOLUME, Tree


def test_a_fabric_volume_is_told_with_each_controller_and_its_state(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.fabric_nvme("tcp", "connecting", "live", ana_states=("optimized", "non-optimized"))
    tree.mount_volume("259:2")
    assert nvme_paths(System(tmp_path), VOLUME) == (
        "nvme1 (tcp, traddr=10.0.0.1,trsvcid=4420) is connecting; fast_io_fail_tmo is off, ctrl_loss_tmo 600 s; "
        "nvme2 (tcp, traddr=10.0.0.2,trsvcid=4420) is live, non-optimized"
    )


def test_a_lost_path_that_fails_soon_says_when(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.fabric_nvme("rdma", "connecting", fast_io_fail="2", ctrl_loss="30")
    tree.mount_volume("259:2")
    assert "is connecting; fast_io_fail_tmo is 2 s, ctrl_loss_tmo 30 s" in nvme_paths(System(tmp_path), VOLUME)


@pytest.mark.parametrize("path", [VOLUME, "/dev/nvme0n1"])
def test_a_local_drive_is_told_whether_the_volume_is_a_file_or_the_device(tmp_path: Path, path: str) -> None:
    tree = Tree(tmp_path)
    tree.local_nvme()
    tree.mount_volume("259:1")
    assert nvme_paths(System(tmp_path), path) == "nvme0 (pcie, 0000:05:00.0) is live"


def test_a_volume_on_something_else_has_none(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert nvme_paths(System(tmp_path), VOLUME) == ""
    tree.file("/proc/self/mountinfo", "")
    assert nvme_paths(System(tmp_path), VOLUME) == ""


def test_links_of_a_path_that_may_hang_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(tmp_path)
    tree.local_nvme()
    tree.mount_volume("259:1")
    asked: list[str] = []
    real = System.real
    monkeypatch.setattr(System, "real", lambda self, name: asked.append(name) or real(self, name))
    monkeypatch.setattr(Path, "stat", lambda self: asked.append(str(self)))
    assert nvme_paths(System(tmp_path), VOLUME)
    assert all(name.startswith("/sys/") for name in asked), asked
