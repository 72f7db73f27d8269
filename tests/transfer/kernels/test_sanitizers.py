"""The suite once more over kernels with address and undefined-behaviour sanitizers: no byte outside a buffer, no word that is not aligned.

In a process of its own, since the address sanitizer must be loaded before Python.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .devices import HERE, SANITIZERS, build, gcc

ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Runs Python with sanitized kernels: (arguments) → CompletedProcess."""
    if gcc() is None:
        pytest.skip("no g++, which compiles the CUDA sources for the CPU")
    runtime = subprocess.run([gcc(), "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no address sanitizer")
    library = build(tmp_path_factory.mktemp("sanitized"), *SANITIZERS)

    def run(*arguments):
        # Python frees little at its end, so leaks say nothing. Its own allocator would hide where an array ends.
        surroundings = {
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "OFFLOADD_TEST_KERNELS_ON_CPU": str(library),
        }
        return subprocess.run([sys.executable, *arguments], env=os.environ | surroundings, cwd=ROOT, capture_output=True, text=True, timeout=1200)

    return run


@pytest.mark.timeout(1500)
def test_the_suite_passes_under_sanitizers(sanitized):
    done = sanitized("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu", str(HERE / "test_kernels.py"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


PRELUDE = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np
from devices import CpuDevice
from offloadd.transfer.kernels.base import Blocks, Region, Slots, plane_table
from offloadd.model.region import Layout, Plane
device = CpuDevice(os.environ["OFFLOADD_TEST_KERNELS_ON_CPU"])
bytes_of = lambda count: device.put(np.ones(count, dtype=np.uint8))
"""
GATHER = """
engine, slots, good, indices = bytes_of({engine}), bytes_of({slots}), bytes_of(1), device.put(np.array([{index}], dtype="<u4"))
table = device.put(plane_table(Layout(4, (Plane(0, 0, 1000, 1000),)), [engine.address]))
device.kernels.gather(Region(table.address, 1, 4, 1000), Blocks(1, indices.address, good.address), Slots(slots.address, 1000))
print("ended")
"""
CHECKSUM = """
payload, lengths, crcs = bytes_of({payload}), device.put(np.array([1000], dtype="<u8")), bytes_of(4)
device.kernels.checksums(Slots(payload.address, 0), 1, lengths.address, 1000, crcs.address)
print("ended")
"""


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (GATHER.format(engine=4000, slots=1000, index=3), None),
        (GATHER.format(engine=3999, slots=1000, index=3), "heap-buffer-overflow"),
        (GATHER.format(engine=4000, slots=999, index=3), "heap-buffer-overflow"),
        (CHECKSUM.format(payload=1000), None),
        (CHECKSUM.format(payload=999), "heap-buffer-overflow"),
    ],
)
def test_the_sanitizer_sees_one_byte_too_many(sanitized, code, seen):
    done = sanitized("-c", PRELUDE + code)
    assert ("ended" in done.stdout) == (seen is None), done.stdout + done.stderr
    if seen is not None:
        assert seen in done.stderr
