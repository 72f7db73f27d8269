"""Topology checks: which devices sit together, and what stands between them on the bus."""

from collections import defaultdict
from collections.abc import Iterator

from offloadd.doctor import nvidia, pci
from offloadd.doctor.checks.gpu import NO_GPU
from offloadd.doctor.finding import Finding, not_applicable, ok, warn
from offloadd.doctor.subject import Machine
from offloadd.machine.system import System
from offloadd.memory.topology import Topology, format_list, read_topology


def check_numa(system: System, machine: Machine) -> Iterator[Finding]:
    """GPUs, RDMA NICs and NVMe drives by NUMA node, and how far the nodes are apart."""
    topology = read_topology(system.root)
    nodes = [node.number for node in topology.nodes]
    devices = [*pci.nvidia_gpus(system), *pci.rdma_nics(system), *pci.nvme_drives(system)]
    if len(nodes) < 2:
        yield ok("one node")
        return
    if not machine.settings.numa:
        yield ok("mover.numa is off: GPUs' movers run anywhere, and the arena lies where it is touched first")
    elif machine.settings.arena_bytes:
        yield _arena(topology)
    if not devices:
        yield not_applicable(f"{len(nodes)} nodes, but no GPU, RDMA NIC or NVMe drive on the bus")
        return
    by_node = defaultdict(list)
    for device in devices:
        by_node[device.numa_node].append(device.name)
    for node, names in sorted(by_node.items()):
        listed = ", ".join(names)
        if node < 0:
            yield warn(
                f"the firmware does not tell the node of {listed}: movers of GPUs there are not bound to one", "set the NUMA or SRAT option of the firmware"
            )
            continue
        far = [f"{distance} to node {other}" for other in nodes if other != node and (distance := pci.numa_distance(system, node, other)) is not None]
        yield ok(f"node {node}: {listed}; distance {', '.join(far) or 'unknown'}")


def _arena(topology: Topology) -> Finding:
    """Over which nodes the arena is spread."""
    used = [node.number for node in topology.tier_nodes]
    left = [node for node in topology.nodes if node.number not in used]
    listed = format_list(used) or "none"
    if any(node.cpus and node.memory_bytes for node in left):
        others = format_list(node.number for node in left)
        return warn(
            f"the arena lies on nodes {listed}; the control group allows no memory of {others}", "docker run --cpuset-mems ...   # systemd: AllowedMemoryNodes="
        )
    reason = f"; nodes {format_list(node.number for node in left)} have no CPUs or no memory" if left else ""
    return ok(f"the arena lies on nodes {listed}{reason}")


def check_iommu(system: System, machine: Machine) -> Iterator[Finding]:
    """An IOMMU that translates sends peer-to-peer traffic through the root complex, or refuses it."""
    gpus = pci.nvidia_gpus(system)
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    kinds = {device.name: pci.iommu_kind(system, device.address) for device in (*gpus, *pci.nvme_drives(system), *pci.rdma_nics(system))}
    translated = [name for name, kind in kinds.items() if kind.startswith("DMA")]
    if translated:
        yield warn(
            f"it translates addresses of {', '.join(translated)}: peer-to-peer is slow or refused", "add iommu=pt to the kernel command line, then reboot"
        )
    else:
        yield ok("passes addresses through" if any(kinds.values()) else "off")


def check_acs(system: System, machine: Machine) -> Iterator[Finding]:
    """PCI bridges with ACS redirection send peer-to-peer traffic up to the root complex and down again."""
    gpus = pci.nvidia_gpus(system)
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    bridges = {bridge for device in (*gpus, *pci.nvme_drives(system), *pci.rdma_nics(system)) for bridge in pci.bridges_above(system, device.address)}
    states = {bridge: pci.acs_redirects(system, bridge) for bridge in sorted(bridges)}
    redirecting = [bridge for bridge, redirects in states.items() if redirects]
    # nvidia-fs lists them for everybody; the bridges' own registers are for root.
    told = [line.strip() for line in (system.text("/proc/driver/nvidia-fs/bridges") or "").splitlines() if line.strip()]
    if redirecting or told:
        found = redirecting or told
        yield warn(
            f"{len(found)} PCI bridge(s) redirect peer-to-peer traffic ({found[0]}…)"
            if len(found) > 1
            else f"bridge {found[0]} redirects peer-to-peer traffic",
            f"for b in {' '.join(found)}; do setpci -s $b ECAP_ACS+6.w=0000; done",
        )
    elif states and all(state is None for state in states.values()):
        yield not_applicable("the bridges' registers can be read by root only")
    elif nvidia.driver(system) is None and not states:
        yield not_applicable("no bridge above the GPUs is visible")
    else:
        yield ok(f"none of {len(states)} bridges redirects peer-to-peer traffic")
