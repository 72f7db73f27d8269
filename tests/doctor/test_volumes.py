"""Volumes: what lies under them, and what real I/O on them tells."""

import os
import stat
from pathlib import Path

import pytest

from offloadd.doctor.direct_io import probe_direct_io
from offloadd.doctor.finding import Level
from offloadd.tiers.volume_io import open_volume
from offloadd.units import MIB, SECTOR_BYTES

from ..root import DEVICE_NODES, needs_root
from .tree import VOLUME, Tree


def test_a_volume_that_is_not_there_is_said_once_with_the_command_that_makes_it(tree: Tree) -> None:
    found = tree.of_volume()
    assert found.checks(Level.FAIL) == {"file"}
    assert found.one("file").mend == f"offloadd volume format {VOLUME} --size 100GiB"
    assert found.one("superblock").level is found.one("direct I/O").level is found.one("space").level is Level.NOT_APPLICABLE


def test_a_sound_volume_is_described(tree: Tree) -> None:
    tree.volume(size_bytes=8 * MIB)
    found = tree.of_volume()
    assert [finding.cause for finding in found["superblock"]] == [
        "8 MiB, 7 slabs, opened 0 times, not in use",
        "7 of 7 slabs were never written: each is, before its first use",
    ]
    assert found.one("file").level is Level.OK


def test_unwritten_slabs_without_prewrite_are_a_warning(tree: Tree) -> None:
    tree.volume()
    finding = tree.of_volume(prewrite=False)["superblock"][1]
    assert (finding.level, finding.mend) == (Level.WARN, "set prewrite = true for this volume")


def test_a_volume_in_use_is_told_and_stays_locked(tree: Tree) -> None:
    path = tree.volume()
    file = open_volume(str(path), busy_wait_s=0)
    try:
        assert "open in a daemon" in tree.of_volume()["superblock"][0].cause
    finally:
        file.close()
    assert "not in use" in tree.of_volume()["superblock"][0].cause


def test_a_foreign_file_and_a_damaged_volume_fail(tree: Tree) -> None:
    path = tree.volume()
    with path.open("r+b") as file:
        file.truncate(2 * MIB)
    damaged = tree.of_volume().one("superblock")
    assert (damaged.level, "was truncated" in damaged.cause, damaged.mend.startswith("offloadd volume format")) == (Level.FAIL, True, True)
    assert str(tree.root) not in damaged.cause
    path.write_bytes(b"\x01" * 2 * MIB)
    foreign = tree.of_volume().one("superblock")
    assert (foreign.level, foreign.cause) == (Level.FAIL, "it is no offloadd volume")


def test_damaged_slab_headers_are_counted(tree: Tree) -> None:
    path = tree.volume()
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"\xff" * SECTOR_BYTES)
    finding = tree.of_volume()["superblock"][1]
    assert (finding.level, finding.cause.startswith("1 of 7 slabs have unreadable headers")) == (Level.WARN, True)


def test_a_volume_that_everybody_may_read_is_a_warning(tree: Tree) -> None:
    tree.volume().chmod(0o644)
    finding = tree.of_volume().one("file")
    assert (finding.level, finding.mend) == (Level.WARN, f"chmod o-rwx {VOLUME}")


def test_a_directory_is_no_volume(tree: Tree) -> None:
    tree.directory(VOLUME)
    found = tree.of_volume()
    assert found.checks(Level.FAIL) >= {"file"}
    assert found.one("superblock").level is Level.NOT_APPLICABLE


def test_a_sparse_volume_that_cannot_be_filled_is_a_warning(tree: Tree) -> None:
    path = tree.volume()
    assert tree.of_volume().one("space").level is Level.OK
    free = os.statvfs(path)
    with path.open("r+b") as file:
        try:
            file.truncate(free.f_bavail * free.f_frsize + 64 * MIB)
        except OSError:
            pytest.skip("this file system takes no sparse file larger than itself")
    finding = tree.of_volume().one("space")
    assert (finding.level, "writes will fail" in finding.cause) == (Level.WARN, True)


def test_the_probe_of_direct_io_agrees_with_what_a_keeper_finds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    file = open_volume(str(path), busy_wait_s=0)
    file.close()
    found = probe_direct_io(str(path))
    assert (0 < found.offset_bytes <= SECTOR_BYTES) == file.direct_io
    assert bool(found.error) != file.direct_io
    assert found.memory_bytes <= SECTOR_BYTES


@pytest.mark.parametrize(
    ("kind", "options", "level", "part"),
    [
        ("xfs", "rw", Level.OK, "xfs at /mnt/kv"),
        ("ext4", "rw", Level.OK, "data=ordered"),
        ("ext4", "rw,data=ordered", Level.OK, "data=ordered"),
        ("ext4", "rw,data=journal", Level.WARN, "written twice"),
        ("ext4", "rw,data=writeback", Level.WARN, "old bytes"),
        ("xfs", "ro", Level.FAIL, "read-only"),
        ("tmpfs", "rw", Level.WARN, "memory"),
        ("nfs4", "rw", Level.WARN, "network"),
        ("fuse.sshfs", "rw", Level.WARN, "network"),
        ("btrfs", "rw", Level.WARN, "copies on write"),
        ("f2fs", "rw", Level.WARN, "not tried"),
    ],
)
def test_file_systems_are_told_with_what_they_cost(tree: Tree, kind: str, options: str, level: Level, part: str) -> None:
    tree.local_nvme()
    tree.mount_volume("259:1", kind, options)
    finding = tree.of_volume().one("file system")
    assert (finding.level, part in finding.cause) == (level, True)


def test_ext4_that_has_counted_errors_fails(tree: Tree) -> None:
    tree.local_nvme()
    tree.mount_volume("259:1", "ext4")
    tree.file("/sys/fs/ext4/nvme0n1/errors_count", "2")
    finding = tree.of_volume()["file system"][1]
    assert (finding.level, finding.mend) == (Level.FAIL, "umount /mnt/kv && e2fsck -f /dev/nvme0n1")


def test_the_mount_nearest_to_the_volume_counts_and_of_two_at_one_point_the_last(tree: Tree) -> None:
    tree.mount("40 27 0:50 / /mnt rw - nfs4 server:/ rw", "41 40 0:51 / /mnt/kv rw - tmpfs tmpfs rw", "42 40 254:0 / /mnt/kv rw - xfs /dev/vda rw")
    tree.mount("43 40 0:52 / /mnt/k rw - nfs4 server:/ rw", "44 40 0:53 / /mnt/kv/vol rw - nfs4 server:/ rw")
    assert tree.of_volume().one("file system").cause == "xfs at /mnt/kv"


def test_a_mount_point_with_a_blank_is_understood(tree: Tree) -> None:
    tree.mount(r"40 27 0:50 / /mnt/my\040kv rw - nfs4 server:/ rw")
    assert "nfs4 at /mnt/my kv" in tree.of_volume("/mnt/my kv/volume0").one("file system").cause


def test_a_link_is_followed_to_the_file_system_behind_it(tree: Tree) -> None:
    tree.local_nvme()
    tree.mount_volume("259:1")
    tree.volume()
    tree.link("/data", "/mnt/kv")
    assert tree.of_volume("/data/volume0").one("file system").cause == "xfs at /mnt/kv"


def mapper(tree: Tree, name: str, number: str, attribute: str, text: str, below: str) -> None:
    directory = f"/sys/devices/virtual/block/{name}"
    tree.disk(name, number, directory)
    tree.file(f"{directory}/{attribute}", text)
    if below:
        tree.link(f"{directory}/slaves/{below}", f"/sys/class/block/{below}")


@pytest.mark.parametrize(
    ("attribute", "text", "kind", "cost"),
    [
        ("dm/uuid", "CRYPT-LUKS2-0123-kv", "crypt", "encrypted by a CPU"),
        ("dm/uuid", "LVM-abcdef", "lvm", "one more layer"),
        ("md/level", "raid5", "md raid5", "parity"),
    ],
)
def test_layers_over_a_drive_are_told_with_what_they_cost_and_force_compat(tree: Tree, attribute: str, text: str, kind: str, cost: str) -> None:
    tree.nvidia()
    tree.nvidia_fs("nvme")
    tree.local_nvme()
    mapper(tree, "dm-0", "252:0", attribute, text, "nvme0n1")
    tree.mount_volume("252:0")
    found = tree.of_volume()
    stack = found.one("stack")
    assert (stack.level, stack.cause.startswith(f"dm-0 ({kind}) > nvme0n1 (nvme): "), cost in stack.cause) == (Level.WARN, True, True)
    assert found.one("paths").level is Level.OK
    assert found.one("gds mode").cause == f"compat: dm-0 ({kind}) is no NVMe namespace"


def test_raid0_is_for_nvidia_fs_alone(tree: Tree) -> None:
    tree.nvidia()
    tree.p2pdma()
    tree.local_nvme()
    mapper(tree, "md0", "9:0", "md/level", "raid0", "nvme0n1")
    tree.mount_volume("9:0")
    assert "P2PDMA mode does not know RAID" in tree.of_volume().one("gds mode").cause
    tree.nvidia_fs("nvme")
    assert tree.of_volume().one("gds mode").cause.startswith("nvfs is possible")


def test_a_loop_device_names_its_file(tree: Tree) -> None:
    mapper(tree, "loop0", "7:0", "loop/backing_file", "/var/kv.img", "")
    tree.mount_volume("7:0")
    stack = tree.of_volume().one("stack")
    assert (stack.level, "(on /var/kv.img)" in stack.cause) == (Level.WARN, True)


def test_a_partition_is_followed_to_its_drive(tree: Tree) -> None:
    tree.local_nvme()
    tree.disk("nvme0n1p1", "259:5", "/sys/devices/pci0000:00/0000:00:01.0/0000:05:00.0/nvme/nvme0/nvme0n1/nvme0n1p1")
    tree.file("/sys/class/block/nvme0n1p1/partition", "1")
    tree.mount_volume("259:5")
    found = tree.of_volume()
    assert found.one("stack").cause == "nvme0n1 (nvme)"
    assert found.one("paths").cause == "nvme0 pcie live 0000:05:00.0"


def test_a_scheduler_on_nvme_is_told_with_the_command(tree: Tree) -> None:
    tree.local_nvme()
    tree.mount_volume("259:1")
    assert tree.of_volume().one("queue").cause == "nvme0n1: scheduler none, write cache: write back, flushed for DURABLE"
    tree.file("/sys/class/block/nvme0n1/queue/scheduler", "none [mq-deadline] kyber")
    finding = tree.of_volume().one("queue")
    assert (finding.level, finding.mend) == (Level.WARN, "echo none > /sys/block/nvme0n1/queue/scheduler")


def test_a_block_device_is_told_by_its_name_and_must_not_be_mounted(tree: Tree) -> None:
    tree.fabric_nvme("rdma", "live", fast_io_fail="5")
    tree.file("/dev/nvme1n1", "")
    found = tree.of_volume("/dev/nvme1n1")
    assert found.one("file system").cause == "block device, no file system"
    assert found.one("paths").level is Level.OK
    tree.mount_volume("259:2")
    finding = tree.of_volume("/dev/nvme1n1").one("file system")
    assert (finding.level, finding.cause) == (Level.FAIL, "the block device is mounted at /mnt/kv")


def test_links_in_dev_are_followed_and_files_in_dev_shm_are_files(tree: Tree) -> None:
    tree.local_nvme()
    tree.file("/dev/nvme0n1", "")
    tree.link("/dev/disk/by-id/nvme-drive", "/dev/nvme0n1")
    for hangs in (False, True):
        assert tree.of_volume("/dev/disk/by-id/nvme-drive", hangs=hangs).one("file system").cause == "block device, no file system"
    assert "tmpfs at /dev/shm" in tree.of_volume("/dev/shm/nvme0n1").one("file system").cause


@pytest.mark.root
def test_a_node_of_any_name_is_told_by_its_number(tree: Tree) -> None:
    needs_root(DEVICE_NODES)
    tree.local_nvme()
    tree.directory("/dev/mapper")
    os.mknod(tree.root / "dev/mapper/kv", 0o600 | stat.S_IFBLK, os.makedev(259, 1))
    assert tree.of_volume("/dev/mapper/kv", hangs=True).one("paths").cause == "nvme0 pcie live 0000:05:00.0"


def test_hidden_names_keep_their_dot(tree: Tree) -> None:
    tree.mount("40 27 0:50 / /.kv rw - nfs4 server:/ rw")
    assert "nfs4 at /.kv" in tree.of_volume("/.kv/volume0").one("file system").cause
