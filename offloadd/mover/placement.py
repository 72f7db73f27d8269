"""Where a GPU's mover runs: on the CPUs of its GPU's NUMA node.

Staging slots need no call of their own: they are touched first by threads that run there, and the kernel takes untouched pages from the node of the thread.
That works where containers refuse the system calls that place memory.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from offloadd.memory.numa import bind_all_threads
from offloadd.memory.topology import UNKNOWN_NODE, format_list, read_topology


@dataclass(frozen=True, slots=True)
class Placement:
    """`memory_node`: whose memory is nearest to the GPU, UNKNOWN_NODE if there is nothing to choose. `text`: what was done, or why nothing; for people."""

    memory_node: int = UNKNOWN_NODE
    text: str = ""


#: Anywhere is as good.
UNPLACED = Placement()


def place_threads(gpu_node: int, root: Path = Path("/")) -> Placement:
    """Bind all threads of this process to the CPUs near to the GPU that sits on node `gpu_node`, out of those that it may use.

    `root`: where sysfs and procfs are mounted. On a machine with one node nothing is done.
    """
    topology = read_topology(root)
    if sum(bool(node.cpus) for node in topology.nodes) < 2:
        return UNPLACED
    if topology.node(gpu_node) is None:
        return Placement(text=f"not bound to a NUMA node: that of its GPU is not known (the firmware says {gpu_node})")
    memory_node, cpus = topology.memory_node(gpu_node), topology.cpus_near(gpu_node)
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        return Placement(memory_node, f"not bound to NUMA node {gpu_node}: none of its CPUs {format_list(cpus)} may be used (cpuset of the container, taskset)")
    try:
        bind_all_threads(allowed)
    except OSError as error:
        return Placement(memory_node, f"not bound to NUMA node {gpu_node}: sched_setaffinity: {error.strerror}")
    return Placement(memory_node, f"NUMA node {gpu_node}, CPUs {format_list(allowed)}")
