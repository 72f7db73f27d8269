"""Placing threads and memory by the kernel's real calls."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.memory.mapping import map_memories, map_private
from offloadd.memory.memfd import create_sealed
from offloadd.memory.numa import _MBIND, prefer_node
from offloadd.units import MIB

#: Where `tests` can be imported from.
ROOT = Path(__file__).parents[2]


def in_a_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT).stdout.strip()


def test_memory_bound_to_the_node_that_there_is_is_memory_as_any_other() -> None:
    mapping = map_private(4 * MIB)
    mapping.bytes[:] = 7
    assert mapping.prefer_node(0, 0, 2 * MIB) == ""
    assert mapping.prefer_node(0, 2 * MIB, 2 * MIB) == ""
    assert (mapping.bytes == 7).all()
    mapping.bytes[:] = 8
    assert int(mapping.bytes[3 * MIB]) == 8
    mapping.close()


MAPS = Path("/proc/self/numa_maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="this kernel shows no policies")


def policies(address: int) -> str:
    """The policy of the mapping that begins here, as the kernel shows it."""
    return next((line.split()[1] for line in MAPS.read_text().splitlines() if int(line.split()[0], 16) == address), "")


@needs_maps
def test_the_kernel_has_the_policy_for_the_stretch_that_was_named() -> None:
    mapping = map_private(6 * MIB)
    start = mapping.bytes.ctypes.data
    assert mapping.prefer_node(0, 2 * MIB, 2 * MIB) == ""
    assert policies(start + 2 * MIB).startswith("prefer") and policies(start + 4 * MIB) == policies(start) == "default"
    mapping.close()


def test_a_node_that_is_not_there_is_told_and_nothing_else_happens() -> None:
    mapping = map_private(2 * MIB)
    for node in (63, 64, 900):
        assert "EINVAL" in mapping.prefer_node(node, 0, 2 * MIB) and f"node {node}" in mapping.prefer_node(node, 0, 2 * MIB)
    mapping.bytes[:] = 7
    mapping.close()


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_a_filter_that_refuses_the_call_is_told(error: str) -> None:
    number = _MBIND[os.uname().machine]
    told = in_a_process(f"""
from tests.memory.refuse_calls import refuse
from offloadd.memory.mapping import map_private
mapping = map_private(1 << 21)
refuse({number}, {getattr(errno, error)})
print(mapping.prefer_node(0, 0, 1 << 21))
mapping.bytes[:] = 7
""")
    assert error in told and "mbind to node 0" in told


def test_a_machine_whose_call_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert prefer_node(0, 0, 0) == "no number of mbind is known on riscv64"


def test_every_thread_is_bound_those_that_others_start_too() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has one CPU")
    cpu = max(os.sched_getaffinity(0))
    told = in_a_process(f"""
import os, threading
from offloadd.memory.numa import bind_all_threads
go, done = threading.Event(), threading.Event()
seen = []
def late():
    seen.append(os.sched_getaffinity(0))
def early():
    go.wait()
    seen.append(os.sched_getaffinity(0))
    later = threading.Thread(target=late); later.start(); later.join()
threads = [threading.Thread(target=early) for _ in range(4)]
for thread in threads: thread.start()
bind_all_threads({{{cpu}}})
go.set()
for thread in threads: thread.join()
print(len(seen), set(map(frozenset, seen)) == {{frozenset({{{cpu}}})}})
""")
    assert told == "8 True"


@needs_maps
def test_a_shared_memory_keeps_its_policy_for_all_who_map_it() -> None:
    fd = create_sealed("shared", 4 * MIB)
    first, second = map_memories([fd], [4 * MIB]), map_memories([fd], [4 * MIB])
    assert first.prefer_node(0, 0, 4 * MIB) == ""
    assert policies(second.bytes.ctypes.data).startswith("prefer")
    for mapping in (first, second):
        mapping.close()
    os.close(fd)
