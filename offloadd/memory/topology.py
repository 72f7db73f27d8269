"""NUMA nodes of the machine: their CPUs and memory, how far they are apart, and on which of them a PCI device sits.

Read from sysfs under a root that tests replace. What can't be read is taken as unknown: a machine without sysfs, or one whose firmware says nothing, is
served as one with a single node.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offloadd.units import KIB

#: What the kernel says of a device whose node the firmware does not tell.
UNKNOWN_NODE = -1
_NODES = "sys/devices/system/node"
_NODE = re.compile(r"node([0-9]+)")
_MEMORY = re.compile(r"MemTotal:\s*([0-9]+) kB")
_MEMORY_ALLOWED = re.compile(r"^Mems_allowed_list:\s*(.*)$", re.MULTILINE)
_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `cpus`: those that are online; `memory_bytes`: 0 for a node without memory; `distances`: the firmware's, by node (10: itself)."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int
    distances: dict[int, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """All nodes by rising number, and those that the control group lets this process take memory from."""

    nodes: tuple[Node, ...]
    allowed_memory: frozenset[int]

    def node(self, number: int) -> Node | None:
        """The node of this number; None if there is none."""
        return next((node for node in self.nodes if node.number == number), None)

    @property
    def tier_nodes(self) -> tuple[Node, ...]:
        """Nodes that memory of the arena may lie on.

        They have CPUs beside their memory: a node of memory alone is an expander that is slower than DDR, or the memory of a GPU.
        """
        return tuple(node for node in self.nodes if node.cpus and node.memory_bytes and node.number in self.allowed_memory)

    def memory_node(self, number: int) -> int:
        """The node whose memory is nearest to this one: itself where it is one of `tier_nodes`. UNKNOWN_NODE if either is not known."""
        node = self.node(number)
        near = [one.number for one in self.tier_nodes]
        if node is None or not near:
            return UNKNOWN_NODE
        if number in near:
            return number
        return min(near, key=lambda one: (node.distances.get(one, 255), one))

    def cpus_near(self, number: int) -> frozenset[int]:
        """The CPUs of a node, or of the nearest one that has any; none if the node is not known."""
        node = self.node(number)
        if node is None or node.cpus:
            return node.cpus if node is not None else frozenset()
        near = min((one for one in self.nodes if one.cpus), key=lambda one: (node.distances.get(one.number, 255), one.number), default=None)
        return near.cpus if near is not None else frozenset()


def read_topology(root: Path = Path("/")) -> Topology:
    """The nodes as the kernel tells them now. Without any, one node 0 of which nothing is known."""
    numbers = sorted(int(match[1]) for path in _entries(root / _NODES) if (match := _NODE.fullmatch(path.name)))
    nodes = tuple(_node(root / _NODES / f"node{number}", number, numbers) for number in numbers)
    allowed = _MEMORY_ALLOWED.search(_text(root / "proc/self/status"))
    return Topology(nodes or (Node(0, frozenset(), 0, {}),), parse_list(allowed[1]) if allowed else frozenset(numbers or (0,)))


def _node(folder: Path, number: int, numbers: list[int]) -> Node:
    memory = _MEMORY.search(_text(folder / "meminfo"))
    row = _text(folder / "distance").split()
    distances = dict(zip(numbers, map(int, row), strict=True)) if len(row) == len(numbers) and all(word.isdecimal() for word in row) else {}
    return Node(number, parse_list(_text(folder / "cpulist")), int(memory[1]) * KIB if memory else 0, distances)


def node_of_pci_device(address: str, root: Path = Path("/")) -> int:
    """The node of a device by its PCI address, as drivers and NVML spell it (`0000:10:00.0`, `00000000:10:00.0`); UNKNOWN_NODE where nobody tells."""
    match = _PCI_ADDRESS.fullmatch(address.strip())
    if match is None:
        return UNKNOWN_NODE
    text = _text(root / "sys/bus/pci/devices" / f"{int(match[1], 16):04x}:{match[2].lower()}" / "numa_node").strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else UNKNOWN_NODE


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if match := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part):
            numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Numbers as the kernel writes them: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
