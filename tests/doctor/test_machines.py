"""Whole machines: what the doctor says of each."""

import pytest

from offloadd.doctor.finding import Level

from .tree import VOLUME, Tree


def rdma_node(tree: Tree, hooks: tuple[str, ...] = ("nvme", "nvme_rdma"), gpus: tuple[int, ...] = (0,)) -> None:
    """H100s, nvidia-fs, and a volume on NVMe/RDMA behind a NIC of node 0."""
    tree.nodes("10 21", "21 10")
    tree.nvidia(gpus=gpus)
    tree.nvidia_fs(*hooks)
    tree.nic(node=0)
    tree.fabric_nvme("rdma", "live", fast_io_fail="5")
    tree.mount_volume("259:2")
    tree.volume()


def p2pdma_node(tree: Tree) -> None:
    """An H100, no nvidia-fs, and a local drive; everything that P2PDMA mode needs."""
    tree.nvidia()
    tree.p2pdma()
    tree.local_nvme()
    tree.mount_volume("259:1")
    tree.volume()


def container(tree: Tree) -> None:
    """A GPU container as runtimes make it, over a host with nvidia-fs and a local drive: no /run/udev, a private /dev/shm, the volume in the own layer."""
    tree.nvidia()
    tree.nvidia_fs("nvme")
    tree.remove("/run/udev")
    tree.file("/.dockerenv", "")
    tree.file("/proc/self/cgroup", "0::/")
    tree.mount("50 27 0:60 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u", "51 27 0:61 / /dev/shm rw - tmpfs shm rw,size=65536k")
    tree.volume()


def test_a_bare_vm_has_no_failure_and_its_gpu_checks_do_not_apply(tree: Tree) -> None:
    tree.volume()
    machine, volume = tree.machine(), tree.of_volume()
    assert machine.checks(Level.FAIL) | volume.checks(Level.FAIL) == set()
    assert machine.checks(Level.WARN) | volume.checks(Level.WARN) <= {"direct I/O"}  # The directory of the tests may be a tmpfs.
    gpu_checks = {"driver", "devices", "libcuda", "nvidia-fs", "p2pdma", "libcufile", "cufile.json", "udev", "modules", "iommu", "acs"}
    gpu_checks |= {"nvml", "compute mode", "mps", "bar1", "gpu memory", "mig", "persistence", "ecc"}
    assert machine.checks(Level.NOT_APPLICABLE) == gpu_checks
    assert volume.one("file system").cause == "ext4 at /, data=ordered"
    assert volume.one("stack").cause == "vda (virtio)"
    assert volume.one("gds mode").level is Level.NOT_APPLICABLE


def test_nvidia_fs_with_rdma_makes_nvfs_possible(tree: Tree) -> None:
    rdma_node(tree)
    machine, volume = tree.machine(), tree.of_volume()
    # The management library can't be a file of a tree; `test_gpu_state.py` has its stand-in.
    assert machine.checks(Level.FAIL) | machine.checks(Level.WARN) == {"nvml"}
    assert machine.one("driver").cause == "570.86.15, open kernel module"
    assert machine.one("devices").cause == "1 visible; the driver holds 1 × NVIDIA H100 80GB HBM3"
    assert machine.one("nvidia-fs").cause == "2.25.7, hooks nvme, nvme_rdma"
    assert machine.one("libcufile").cause == "/usr/local/cuda/lib64/libcufile.so.0, 1.14.1"
    assert volume.one("gds mode").cause.startswith("nvfs is possible")
    assert volume.one("paths").cause == "nvme1 rdma live optimized traddr=10.0.0.1,trsvcid=4420"
    assert volume.one("timeouts").cause == "nvme1: I/O fails after 5 s, reconnects 600 s"
    assert volume.one("distance").cause == "mlx5_0 on node 0; all 1 GPUs have one of these nodes"


def test_a_storage_driver_that_nvidia_fs_has_not_hooked_means_compat(tree: Tree) -> None:
    rdma_node(tree, hooks=("nvme",))
    finding = tree.of_volume().one("gds mode")
    assert (finding.level, finding.cause) == (Level.WARN, "compat: nvidia-fs has not hooked nvme_rdma; P2PDMA mode does not know NVMe-oF")
    assert "MLNX_OFED" in finding.mend


def test_gpus_of_another_node_than_the_nic_are_named_with_their_distance(tree: Tree) -> None:
    rdma_node(tree, gpus=(0, 1))
    finding = tree.of_volume().one("distance")
    assert finding.level is Level.WARN
    assert "1 of 2 GPUs are on other nodes (distance 21)" in finding.cause
    assert [found.cause for found in tree.machine()["numa"]] == [
        "the arena lies on nodes 0-1",
        "node 0: GPU 0000:40:00.0, mlx5_0; distance 21 to node 1",
        "node 1: GPU 0000:41:00.0; distance 21 to node 0",
    ]


def test_what_the_daemon_makes_of_numa_nodes_is_told(tree: Tree) -> None:
    tree.nodes("10 21 30", "21 10 30", "30 30 10")
    tree.nvidia(gpus=(-1,))
    tree.file("/sys/devices/system/node/node2/cpulist", "")
    arena, gpu = tree.machine()["numa"]
    assert (arena.level, arena.cause) == (Level.OK, "the arena lies on nodes 0-1; nodes 2 have no CPUs or no memory")
    assert gpu.level is Level.WARN and "not bound to one" in gpu.cause
    assert tree.machine(numa=False)["numa"][0].cause.startswith("mover.numa is off")
    assert len(tree.machine(arena_bytes=0)["numa"]) == 1
    tree.file("/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\nMems_allowed_list:\t1")
    finding = tree.machine()["numa"][0]
    assert (finding.level, finding.cause) == (Level.WARN, "the arena lies on nodes 1; the control group allows no memory of 0,2")


def test_transfers_that_nvidia_fs_failed_at_are_counted(tree: Tree) -> None:
    rdma_node(tree)
    tree.nvidia_fs("nvme", errors=3)
    assert "3 transfers have failed" in tree.machine()["nvidia-fs"][1].cause


def test_a_p2pdma_node_does_without_nvidia_fs(tree: Tree) -> None:
    p2pdma_node(tree)
    machine, volume = tree.machine(), tree.of_volume()
    # The management library can't be a file of a tree; `test_gpu_state.py` has its stand-in.
    assert machine.checks(Level.FAIL) | machine.checks(Level.WARN) == {"nvml"}
    assert machine.one("nvidia-fs").cause == "nvidia-fs is not loaded; P2PDMA mode does without"
    assert volume.one("gds mode").cause.startswith("p2pdma is possible")
    assert volume.one("paths").cause == "nvme0 pcie live 0000:05:00.0"


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("/proc/sys/kernel/osrelease", "6.1.0-28-amd64", "Linux 6.1; 6.2 or newer is needed"),
        ("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.05  Release Build", "driver 560.35.05; 565"),
        ("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Sep 23 2025", "proprietary"),
        ("/boot/config-6.8.0-50-generic", "# CONFIG_PCI_P2PDMA is not set", "without CONFIG_PCI_P2PDMA"),
        ("/sys/module/nvme_core/parameters/multipath", "Y", "multipath is on"),
        ("/proc/driver/nvidia/params", 'RegistryDwords: ""', "RMForceStaticBar1"),
        ("/etc/cufile.json", '{"properties": {"use_pci_p2pdma": false}}', "does not set properties.use_pci_p2pdma"),
    ],
)
def test_each_thing_that_p2pdma_mode_lacks_is_named(tree: Tree, name: str, text: str, cause: str) -> None:
    p2pdma_node(tree)
    tree.file(name, text)
    finding = tree.machine().one("p2pdma")
    assert finding.level is Level.WARN
    assert cause in finding.cause
    mode = tree.of_volume().one("gds mode")
    assert (mode.level, mode.cause) == (Level.WARN, f"compat: nvidia-fs is not loaded; {finding.cause}")
    assert mode.mend == "modprobe nvidia-fs"


def test_a_container_without_udev_is_told_what_it_lacks(tree: Tree) -> None:
    container(tree)
    machine, volume = tree.machine(), tree.of_volume()
    assert machine.checks(Level.FAIL) == set()
    udev = machine.one("udev")
    assert (udev.level, udev.mend) == (Level.WARN, "docker run -v /run/udev:/run/udev:ro ...")
    shm = machine.one("shm")
    assert (shm.level, "--ipc=host" in shm.mend) == (Level.WARN, True)
    assert volume.one("gds mode").cause == "compat: /run/udev is missing"
    overlay = volume.one("file system")
    assert (overlay.level, "overlay at /" in overlay.cause) == (Level.WARN, True)
    assert volume.one("stack").level is Level.NOT_APPLICABLE


def test_gpu_nodes_without_libcuda_fail(tree: Tree) -> None:
    container(tree)
    tree.remove("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    finding = tree.machine().one("libcuda")
    assert (finding.level, "NVIDIA_DRIVER_CAPABILITIES" in finding.mend) == (Level.FAIL, True)


def test_a_libcuda_of_another_version_than_the_kernel_module_is_told(tree: Tree) -> None:
    tree.nvidia(version="570.86.15", libcuda="535.104.05")
    assert tree.machine().one("libcuda").level is Level.WARN


def test_no_proc_modules_fails_where_there_is_a_gpu(tree: Tree) -> None:
    container(tree)
    tree.remove("/proc/modules")
    assert tree.machine().one("modules").level is Level.FAIL


def test_nvidia_fs_nodes_that_a_container_lacks_are_named(tree: Tree) -> None:
    container(tree)
    tree.remove("/dev/nvidia-fs0")
    finding = tree.machine().one("nvidia-fs")
    assert (finding.level, "--device=/dev/nvidia-fs0" in finding.mend) == (Level.WARN, True)


def test_a_driver_without_device_nodes_fails(tree: Tree) -> None:
    tree.nvidia()
    tree.remove("/dev/nvidia0")
    assert tree.machine().one("devices").level is Level.FAIL


def test_a_gpu_without_a_driver_is_a_warning(tree: Tree) -> None:
    tree.pci("0000:40:00.0", 0, "0x10de", "0x030200")
    finding = tree.machine().one("driver")
    assert (finding.level, finding.mend.startswith("modprobe nvidia")) == (Level.WARN, True)


def test_a_filter_without_sys_nice_matters_on_two_nodes(tree: Tree) -> None:
    tree.file("/.dockerenv", "")
    tree.file("/proc/self/status", "CapEff:\t00000000a80425fb\nSeccomp:\t2")
    assert tree.machine().one("seccomp").level is Level.OK
    tree.nodes("10 21", "21 10")
    assert tree.machine().one("seccomp").mend == "docker run --cap-add SYS_NICE ..."
    tree.file("/proc/self/status", "CapEff:\t00000000a88425fb\nSeccomp:\t2")
    assert tree.machine().one("seccomp").level is Level.OK


def test_tcp_without_fast_io_fail_is_told_with_the_command_and_is_never_gds(tree: Tree) -> None:
    tree.nvidia()
    tree.nvidia_fs("nvme", "nvme_rdma")
    tree.fabric_nvme("tcp", "live")
    tree.mount_volume("259:2")
    tree.volume()
    volume = tree.of_volume()
    finding = volume.one("timeouts")
    assert finding.level is Level.WARN
    assert finding.cause == "nvme1: fast_io_fail_tmo is off: I/O blocks 600 s when the target is gone"
    assert finding.mend == "echo 5 > /sys/class/nvme/nvme1/fast_io_fail_tmo"
    assert volume.one("gds mode").cause == "compat: nvme1 is reached by tcp, which cuFile does not know"


@pytest.mark.parametrize(
    ("fast_io_fail", "ctrl_loss", "level", "part"),
    [
        ("5", "600", Level.OK, "fails after 5 s, reconnects 600 s"),
        ("5", "off", Level.OK, "reconnects for ever"),
        ("off", "off", Level.WARN, "blocks for ever"),
        ("2", "3", Level.WARN, "the disk is removed"),
    ],
)
def test_timeouts_of_a_fabric(tree: Tree, fast_io_fail: str, ctrl_loss: str, level: Level, part: str) -> None:
    tree.fabric_nvme("tcp", "live", fast_io_fail=fast_io_fail, ctrl_loss=ctrl_loss)
    tree.mount_volume("259:2")
    finding = tree.of_volume().one("timeouts")
    assert (finding.level, part in finding.cause) == (level, True)


@pytest.mark.parametrize(
    ("states", "level", "part"),
    [
        (("live", "live"), Level.OK, "nvme1 tcp live optimized"),
        (("live", "connecting"), Level.WARN, "1 of 2 paths lost"),
        (("connecting",), Level.FAIL, "no path is live"),
    ],
)
def test_lost_paths_are_seen_below_the_multipath_head(tree: Tree, states: tuple[str, ...], level: Level, part: str) -> None:
    tree.fabric_nvme("tcp", *states)
    tree.mount_volume("259:2")
    volume = tree.of_volume()
    finding = volume.one("paths")
    assert (finding.level, part in finding.cause) == (level, True)
    assert volume.one("multipath").cause.startswith(f"nvme1n1: {'2 paths, policy numa' if len(states) == 2 else 'one path'}")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{\n  // why\n  "properties": {"allow_compat_mode": true,}\n}', "line 3, column 44"),
        ('{\n/* a\nb */ "x": yes}', "line 3, column 11"),
        ("[1]", "it is no JSON object"),
        ("", "line 1, column 1"),
    ],
)
def test_a_broken_cufile_json_fails_with_the_place(tree: Tree, text: str, cause: str) -> None:
    tree.nvidia()
    path = tree.file("/etc/cufile.json", "")
    path.write_text(text)
    finding = tree.machine().one("cufile.json")
    assert (finding.level, finding.mend) == (Level.FAIL, "$EDITOR /etc/cufile.json")
    assert cause in finding.cause


def test_cufile_json_may_have_comments_and_is_found_by_the_environment(tree: Tree) -> None:
    tree.nvidia()
    tree.environment["CUFILE_ENV_PATH_JSON"] = "/opt/cufile.json"
    assert tree.machine().one("cufile.json").level is Level.FAIL
    tree.file("/opt/cufile.json", '{\n// off\n"properties": {"allow_compat_mode": false /* loud */}, "logging": {"dir": "http://x", "level": "TRACE"}}')
    causes = [finding.cause for finding in tree.machine()["cufile.json"]]
    assert causes[0] == "/opt/cufile.json is valid"
    assert causes[1].startswith("allow_compat_mode is false")
    assert causes[2].startswith("logging.level is TRACE")


def test_a_broken_cufile_json_without_a_gpu_is_a_warning(tree: Tree) -> None:
    tree.file("/etc/cufile.json", "{")
    assert tree.machine().one("cufile.json").level is Level.WARN


def acs(control: int) -> bytes:
    """Configuration space of a bridge: two extended capabilities, AER and then ACS with this control register."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(config)


def test_acs_redirection_is_read_from_the_bridges_registers(tree: Tree) -> None:
    p2pdma_node(tree)
    bridge = tree.root / "sys/devices/pci0000:00/0000:00:01.0/config"
    bridge.write_bytes(acs(0x001D))
    finding = tree.machine().one("acs")
    assert (finding.level, finding.mend) == (Level.WARN, "for b in 0000:00:01.0; do setpci -s $b ECAP_ACS+6.w=0000; done")
    bridge.write_bytes(acs(0x0001))
    assert tree.machine().one("acs").level is Level.OK
    bridge.write_bytes(acs(0x001D)[:64])
    assert tree.machine().one("acs").level is Level.NOT_APPLICABLE


def test_an_iommu_that_translates_is_told(tree: Tree) -> None:
    p2pdma_node(tree)
    assert tree.machine().one("iommu").cause == "off"
    tree.file("/sys/devices/pci0000:00/0000:00:01.0/0000:40:00.0/iommu_group/type", "identity")
    assert tree.machine().one("iommu").cause == "passes addresses through"
    tree.file("/sys/devices/pci0000:00/0000:00:01.0/0000:05:00.0/iommu_group/type", "DMA-FQ")
    assert "translates addresses of nvme0" in tree.machine().one("iommu").cause


def test_a_hanging_volume_is_still_described_from_sysfs(tree: Tree) -> None:
    tree.fabric_nvme("tcp", "connecting")
    tree.mount_volume("259:2")
    volume = tree.of_volume(VOLUME, hangs=True)
    assert volume.one("superblock").cause == "not tried: the volume hangs"
    assert volume.one("paths").level is Level.FAIL
