"""NUMA nodes out of sysfs, whatever it says."""

import random
from pathlib import Path

import pytest

from offloadd.memory.topology import UNKNOWN_NODE, Topology, format_list, node_of_pci_device, parse_list, read_topology
from offloadd.units import GIB

from .trees import allow_memory, node, pci_device, two_nodes


def numbers(topology: Topology) -> list[int]:
    return [one.number for one in topology.tier_nodes]


def test_a_machine_without_sysfs_has_one_node_of_which_nothing_is_known(tmp_path: Path) -> None:
    topology = read_topology(tmp_path)
    assert [one.number for one in topology.nodes] == [0] and topology.tier_nodes == ()
    assert topology.memory_node(0) == topology.memory_node(UNKNOWN_NODE) == UNKNOWN_NODE


def test_one_node_is_read_whole(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3,8", memory_gib=16, distances="10")
    (one,) = read_topology(tmp_path).tier_nodes
    assert (one.number, one.cpus, one.memory_bytes, one.distances) == (0, {0, 1, 2, 3, 8}, 16 * GIB, {0: 10})


def test_each_of_two_nodes_is_its_own_memory_node(tmp_path: Path) -> None:
    topology = read_topology(two_nodes(tmp_path, "0-31,64-95", "32-63,96-127"))
    assert numbers(topology) == [0, 1]
    assert [topology.memory_node(number) for number in (0, 1, 2, -1)] == [0, 1, UNKNOWN_NODE, UNKNOWN_NODE]
    assert topology.cpus_near(1) == set(range(32, 64)) | set(range(96, 128))


def test_four_nodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    # Nodes 0, 2, 8 and 10: a machine may leave numbers out, and sorts them as text.
    for number, row in ((10, "32 32 21 10"), (2, "21 10 32 32"), (0, "10 21 32 32"), (8, "32 32 10 21")):
        node(tmp_path, number, str(number), distances=row)
    topology = read_topology(tmp_path)
    assert numbers(topology) == [0, 2, 8, 10]
    found = topology.node(10)
    assert found is not None and found.distances == {0: 32, 2: 32, 8: 21, 10: 10}


def test_a_node_without_memory_has_its_memory_on_the_nearest_that_has(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3", distances="10 32 12")
    node(tmp_path, 1, "4-7", distances="32 10 21")
    node(tmp_path, 2, "8-11", memory_gib=0, distances="12 21 10")
    topology = read_topology(tmp_path)
    assert numbers(topology) == [0, 1]
    assert topology.memory_node(2) == 0 and topology.cpus_near(2) == {8, 9, 10, 11}


def test_a_node_without_cpus_holds_no_arena(tmp_path: Path) -> None:
    # Memory of a GPU that the kernel shows as a node, or an expander: not what a tier of DDR is to lie on.
    node(tmp_path, 0, "0-3", distances="10 80")
    node(tmp_path, 1, "", memory_gib=96, distances="80 10")
    topology = read_topology(tmp_path)
    assert numbers(topology) == [0]
    assert topology.memory_node(1) == 0 and topology.cpus_near(1) == {0, 1, 2, 3}


def test_cpus_that_are_offline_are_no_cpus_of_a_node(tmp_path: Path) -> None:
    # The kernel leaves them out of cpulist; with the last of them, the node has none.
    two_nodes(tmp_path, "0,2-3", "")
    assert numbers(read_topology(tmp_path)) == [0]


def test_memory_that_the_control_group_does_not_allow_holds_no_arena(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    allow_memory(tmp_path, "1")
    topology = read_topology(tmp_path)
    assert numbers(topology) == [1] and topology.memory_node(0) == 1


@pytest.mark.parametrize("row", ["", "10", "10 x", "10 20 30"])
def test_distances_that_can_not_be_read_are_unknown(tmp_path: Path, row: str) -> None:
    node(tmp_path, 0, "0", distances=row)
    node(tmp_path, 1, "1", distances="21 10")
    topology = read_topology(tmp_path)
    assert topology.nodes[0].distances == {} and topology.memory_node(0) == 0


def test_a_device_is_found_however_its_address_is_spelt(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:1b:00.0", 1)
    pci_device(tmp_path, "0001:1b:00.0", 0)
    pci_device(tmp_path, "10000:01:00.0", 2)
    # As the driver, NVML and the kernel write it.
    assert [node_of_pci_device(name, tmp_path) for name in ("0000:1B:00.0", "00000000:1B:00.0", "0000:1b:00.0")] == [1, 1, 1]
    assert node_of_pci_device("0001:1B:00.0", tmp_path) == 0 and node_of_pci_device("00010000:01:00.0", tmp_path) == 2


@pytest.mark.parametrize("text", ["-1", "", "one"])
def test_a_device_whose_node_nobody_tells_is_on_none(tmp_path: Path, text: str) -> None:
    pci_device(tmp_path, "0000:1b:00.0", 0)
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node").write_text(text)
    assert node_of_pci_device("0000:1b:00.0", tmp_path) == UNKNOWN_NODE
    assert node_of_pci_device("0000:1c:00.0", tmp_path) == node_of_pci_device("../../../node", tmp_path) == UNKNOWN_NODE


def test_lists_are_read_as_they_are_written() -> None:
    assert format_list([]) == "" and parse_list("\n") == set()
    assert format_list([3, 0, 1, 2, 8]) == "0-3,8"
    generator = random.Random(7)
    for _ in range(100):
        some = {generator.randrange(40) for _ in range(generator.randrange(30))}
        assert parse_list(format_list(some) + "\n") == some
