"""Movers of GPUs run on the CPUs near to their GPU: with this machine's real CPUs, on machines of other shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.mover.placement import UNPLACED

from ..memory.trees import allow_memory, node, two_nodes

ROOT = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="this process has one CPU")


def place(root: Path, gpu_node: int, before: str = "") -> tuple[int, str, set[int]]:
    """In a process of its own: the memory node, what is told, and the CPUs of its threads afterwards."""
    code = f"""
import json, os, threading
from pathlib import Path
{before}
from offloadd.mover.placement import place_threads
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
placement = place_threads({gpu_node}, Path({str(root)!r}))
cpus = {{frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}}
stop.set()
print(json.dumps([placement.memory_node, placement.text, [sorted(one) for one in cpus]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
    memory_node, text, cpus = json.loads(done.stdout)
    assert len(cpus) == 1, "threads differ"
    return memory_node, text, set(cpus[0])


@two_cpus
def test_all_threads_run_on_the_cpus_of_the_gpus_node(tmp_path: Path) -> None:
    two_nodes(tmp_path, f"{CPUS[0]}", f"{CPUS[1]},999")
    assert place(tmp_path, 1) == (1, f"NUMA node 1, CPUs {CPUS[1]}", {CPUS[1]})


@two_cpus
def test_only_cpus_that_the_process_had_before_are_used(tmp_path: Path) -> None:
    two_nodes(tmp_path, "900-903", f"{CPUS[0]}-{CPUS[-1]}")
    assert place(tmp_path, 1, f"os.sched_setaffinity(0, {{{CPUS[1]}}})") == (1, f"NUMA node 1, CPUs {CPUS[1]}", {CPUS[1]})


@two_cpus
def test_a_process_that_may_use_none_of_them_stays_where_it_is_and_tells_so(tmp_path: Path) -> None:
    two_nodes(tmp_path, f"{CPUS[0]}", f"{CPUS[1]}")
    memory_node, text, cpus = place(tmp_path, 1, f"os.sched_setaffinity(0, {{{CPUS[0]}}})")
    assert (memory_node, cpus) == (1, {CPUS[0]}), "its memory is near to the GPU all the same"
    assert text.startswith(f"not bound to NUMA node 1: none of its CPUs {CPUS[1]} may be used")


@two_cpus
def test_a_kernel_that_refuses_is_told(tmp_path: Path) -> None:
    two_nodes(tmp_path, f"{CPUS[0]}", f"{CPUS[1]}")
    # sched_setaffinity on x86-64 and on arm64.
    number = {"x86_64": 203, "aarch64": 122}[os.uname().machine]
    memory_node, text, cpus = place(tmp_path, 0, f"from tests.memory.refuse_calls import refuse\nrefuse({number}, 1)")
    assert (memory_node, cpus) == (0, set(CPUS))
    assert text == "not bound to NUMA node 0: sched_setaffinity: Operation not permitted"


@pytest.mark.parametrize("gpu_node", [-1, 7])
def test_a_gpu_whose_node_is_not_known_leaves_its_mover_unbound(tmp_path: Path, gpu_node: int) -> None:
    two_nodes(tmp_path)
    memory_node, text, cpus = place(tmp_path, gpu_node)
    assert (memory_node, cpus) == (-1, set(CPUS)) and f"(the firmware says {gpu_node})" in text


@pytest.mark.parametrize("gpu_node", [-1, 0])
def test_on_a_machine_with_one_node_nothing_is_done_and_nothing_told(tmp_path: Path, gpu_node: int) -> None:
    node(tmp_path, 0, f"{CPUS[0]}")
    # A second one of memory alone changes nothing.
    node(tmp_path, 1, "")
    assert place(tmp_path, gpu_node) == (UNPLACED.memory_node, UNPLACED.text, set(CPUS))


@two_cpus
def test_a_node_without_memory_has_its_own_cpus_and_its_neighbours_memory(tmp_path: Path) -> None:
    node(tmp_path, 0, f"{CPUS[0]}", distances="10 21")
    node(tmp_path, 1, f"{CPUS[1]}", memory_gib=0, distances="21 10")
    assert place(tmp_path, 1) == (0, f"NUMA node 1, CPUs {CPUS[1]}", {CPUS[1]})


@two_cpus
def test_memory_that_the_control_group_does_not_allow_is_not_preferred(tmp_path: Path) -> None:
    two_nodes(tmp_path, f"{CPUS[0]}", f"{CPUS[1]}")
    allow_memory(tmp_path, "0")
    assert place(tmp_path, 1) == (0, f"NUMA node 1, CPUs {CPUS[1]}", {CPUS[1]})
