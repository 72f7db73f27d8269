"""Machines with NUMA nodes as directory trees, as the kernel lays them out."""

from pathlib import Path

GIB_KB = 1 << 20


def node(root: Path, number: int, cpus: str, memory_gib: int = 64, distances: str = "") -> None:
    folder = root / f"sys/devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    (folder / "meminfo").write_text(f"\nNode {number} MemTotal:       {memory_gib * GIB_KB} kB\nNode {number} MemFree:        1000 kB\n")
    if distances:
        (folder / "distance").write_text(f"{distances}\n")


def allow_memory(root: Path, nodes: str) -> None:
    """What the control group's cpuset leaves."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/status").write_text(f"Name:\tpython\nCpus_allowed_list:\t0-3\nMems_allowed:\t00000000,00000003\nMems_allowed_list:\t{nodes}\n")


def pci_device(root: Path, address: str, numa_node: int) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa_node}\n")


def two_nodes(root: Path, first: str = "0", second: str = "1") -> Path:
    node(root, 0, first, distances="10 21")
    node(root, 1, second, distances="21 10")
    return root
