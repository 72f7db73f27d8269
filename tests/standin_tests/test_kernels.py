"""The real kernels, launched by CupyLauncher over the double of CuPy, are stream work on device memory, and nothing else reaches that."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..standin.build import Paths
from ..standin.controls import CUPY, Control, environment, wait_until
from ..standin.kernels import build_kernels
from .child import Child

ROOT = Path(__file__).parents[2]
LAUNCH_FAILED = 719

# Three blocks of 3,000 bytes in two planes, gathered into three slots. `put` and `get` reach device memory by copies alone.
BEGIN = """
import numpy as np
from offloadd.model.region import Layout, Plane
from offloadd.transfer.kernels.base import Blocks, Region, Slots, plane_table
from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels
device_context()
kernels = open_cupy_kernels(0)
a, b = (ok(cu.cuStreamCreate(1)) for _ in range(2))
layout = Layout(8, (Plane(0, 0, 1000, 1000), Plane(1, 24, 2001, 2000)))
payload = 3000

def put(values):
    values = np.ascontiguousarray(values)
    pointer = int(ok(cu.cuMemAlloc(max(1, values.nbytes))))
    ok(cu.cuMemcpyHtoD(pointer, values.ctypes.data, values.nbytes))
    return pointer

def get(pointer, count, dtype="u1"):
    values = np.empty(count, dtype=dtype)
    ok(cu.cuMemcpyDtoH(values.ctypes.data, pointer, values.nbytes))
    return values

def ones(count, dtype="u1"):
    return np.ones(count, dtype=dtype)

random = np.random.default_rng(1)
memories = [random.integers(0, 256, 8000, dtype="u1"), random.integers(0, 256, 16100, dtype="u1")]
"""
REGION = """
pointers = [put(memory) for memory in memories]
table = plane_table(layout, pointers)
region = Region(put(table), len(table), 8, payload)
slots = Slots(put(np.zeros(3 * 4096, dtype="u1")), 4096, 96)
blocks = Blocks(3, put(np.array([6, 1, 3], dtype="u4")), put(ones(3)))
lengths, crcs, expected = put(np.full(3, payload, dtype="u8")), put(np.zeros(3, dtype="u4")), put(np.zeros(3, dtype="u4"))
"""
# What HostKernels makes of the same: slots, CRCs, flags and memories.
TWIN = """
from offloadd.transfer.kernels.host import HostKernels
class Twin:
    def __init__(self):
        self.kernels, self.memories = HostKernels(), [memory.copy() for memory in memories]
        self.table = plane_table(layout, [memory.ctypes.data for memory in self.memories])
        self.region = Region(self.table.ctypes.data, len(self.table), 8, payload)
        self.bytes, self.good, self.crcs = np.zeros(3 * 4096, dtype="u1"), ones(3), np.zeros(3, dtype="u4")
        self.slots = Slots(self.bytes.ctypes.data, 4096, 96)
        self.lengths = np.full(3, payload, dtype="u8")
    def blocks(self, *indices):
        self.indices = np.array(indices, dtype="u4")
        return Blocks(len(indices), self.indices.ctypes.data, self.good.ctypes.data)
    def checksums(self):
        self.kernels.checksums(self.slots, 3, self.lengths.ctypes.data, payload, self.crcs.ctypes.data)
        return self.crcs.tolist()
"""


@pytest.fixture
def kernel_child(make_kernel_child: Callable[[], Child]) -> Child:
    child = make_kernel_child()
    child.run(BEGIN)
    return child


def test_the_suite_of_the_kernels_that_a_gpu_has_to_pass_passes_here(paths: Paths, control: Control, kernels: Path) -> None:
    suite = ROOT / "tests" / "transfer" / "kernels" / "test_kernels.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", "cupy", str(suite)]
    done = subprocess.run(command, cwd=ROOT, env=environment(paths, control, kernels=kernels), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
    [process] = control
    launched = {name: process.calls[f"kernel {name}"] for name in ("gather", "scatter", "crc32c_begin", "crc32c_pieces", "crc32c_verify")}
    assert min(launched.values()) > 0
    assert process.counters.kernels == sum(launched.values()) == process.calls["cuLaunchKernel"]


def test_a_block_goes_to_a_slot_and_back_as_the_numpy_twin_moves_it(kernel_child: Child, control: Control) -> None:
    kernel_child.run(REGION + TWIN)
    before = control.process(kernel_child.pid).counters
    kernel_child.run("""
        kernels.gather(region, blocks, slots, stream=int(a))
        kernels.checksums(slots, 3, lengths, payload, crcs, stream=int(a))
        back = Blocks(3, put(np.array([0, 7, 9], dtype="u4")), blocks.good)
        kernels.scatter(region, back, slots, stream=int(a))
        ok(cu.cuStreamSynchronize(a))
    """)
    after = control.process(kernel_child.pid).counters
    assert (after - before).kernels == 4
    assert (after - before).host_copies == 1  # `put`
    differing = kernel_child.run("""
        twin = Twin()
        twin.kernels.gather(twin.region, twin.blocks(6, 1, 3), twin.slots)
        twin_crcs = twin.checksums()
        twin.kernels.scatter(twin.region, twin.blocks(0, 7, 9), twin.slots)
        assert twin.good.tolist() == [1, 1, 0] and any((old != new).any() for old, new in zip(memories, twin.memories))
        pairs = [(get(slots.base, 3 * 4096), twin.bytes), (get(crcs, 3, "u4"), twin_crcs), (get(blocks.good, 3), twin.good)]
        pairs += [(get(pointer, memory.size), memory) for pointer, memory in zip(pointers, twin.memories)]
        result = [number for number, (ours, theirs) in enumerate(pairs) if (ours != theirs).any()]
    """)
    assert differing == []


def test_scatter_skips_what_verify_found_wrong_before_it_on_the_stream(kernel_child: Child, control: Control) -> None:
    kernel_child.run(REGION + TWIN)
    process = control.process(kernel_child.pid)
    kernel_child.run("""
        for stage in (lambda: kernels.gather(region, blocks, slots), lambda: kernels.checksums(slots, 3, lengths, payload, expected)):
            stage(); ok(cu.cuStreamSynchronize(0))
        ok(cu.cuMemsetD8(slots.first_payload + 4096 + 1234, 0, 1)); ok(cu.cuMemsetD8(slots.first_payload + 4096 + 1235, 255, 1))
        back = Blocks(3, put(np.array([0, 7, 5], dtype="u4")), blocks.good)
        before = [get(pointer, memory.size) for pointer, memory in zip(pointers, memories)]
    """)
    # All three are queued before the first one runs: nobody looks at the flags in between.
    process.hold()
    kernel_child.run("""
        kernels.checksums(slots, 3, lengths, payload, crcs, stream=int(a))
        kernels.verify(crcs, expected, blocks.good, 3, stream=int(a))
        kernels.scatter(region, back, slots, stream=int(a))
    """)
    process.release()
    good, moved = kernel_child.run("""
        ok(cu.cuStreamSynchronize(a))
        after = [get(pointer, memory.size) for pointer, memory in zip(pointers, memories)]
        def block(memories, index):
            return memories[0][index * 1000 : index * 1000 + 1000].tobytes() + memories[1][24 + index * 2001 : 24 + index * 2001 + 2000].tobytes()
        result = get(blocks.good, 3).tolist(), [
            [source for source in range(8) if block(after, target) == block(before, source)] for target in (0, 7, 5)
        ]
    """)
    assert good == [1, 0, 1]
    assert moved == [[6], [7], [3]]  # block 7 is what it was


def test_held_streams_hold_kernels_and_events_come_after_them(kernel_child: Child, control: Control) -> None:
    kernel_child.run(REGION)
    process = control.process(kernel_child.pid)
    before = process.counters
    process.hold()
    states = kernel_child.run("""
        event = ok(cu.cuEventCreate(2))
        kernels.gather(region, blocks, slots, stream=int(a))
        ok(cu.cuEventRecord(event, a))
        result = error(cu.cuEventQuery(event)), error(cu.cuStreamQuery(a))
    """)
    assert states == ["NOT_READY", "NOT_READY"]
    assert (process.counters - before).kernels == 0
    process.permit(1)
    wait_until(lambda: (process.counters - before).kernels == 1, "the kernel")
    assert kernel_child.run("result = error(cu.cuEventQuery(event))") == "NOT_READY"
    process.permit(1)
    kernel_child.run("ok(cu.cuEventSynchronize(event))")


def test_a_checksum_that_does_not_wait_for_the_gather_is_one_of_old_bytes(kernel_child: Child) -> None:
    kernel_child.run(REGION + TWIN)
    empty, early, late = kernel_child.run("""
        def checked(waits):
            gate = put(np.zeros(1, dtype="u4"))
            ok(cu.cuMemsetD8(slots.base, 0, 3 * 4096)); ok(cu.cuCtxSynchronize())
            event, third = ok(cu.cuEventCreate(2)), ok(cu.cuStreamCreate(1))
            ok(cu.cuStreamWaitValue32(a, gate, 1, 0))
            kernels.gather(region, blocks, slots, stream=int(a))
            ok(cu.cuEventRecord(event, a))
            if waits:
                ok(cu.cuStreamWaitEvent(b, event, 0))
            kernels.checksums(slots, 3, lengths, payload, crcs, stream=int(b))
            if not waits:
                ok(cu.cuStreamSynchronize(b))
            ok(cu.cuStreamWriteValue32(third, gate, 1, 0))
            ok(cu.cuStreamSynchronize(a)); ok(cu.cuStreamSynchronize(b))
            return get(crcs, 3, "u4").tolist()
        twin = Twin()
        empty = twin.checksums()
        twin.kernels.gather(twin.region, twin.blocks(6, 1, 3), twin.slots)
        right = twin.checksums()
        result = empty, checked(waits=False), checked(waits=True) == right
    """)
    assert early == empty and late is True


def test_kernels_of_several_streams_do_not_disturb_each_other(kernel_child: Child, control: Control) -> None:
    kernel_child.run(REGION + TWIN)
    kernel_child.run("""
        streams = [ok(cu.cuStreamCreate(1)) for _ in range(6)]
        own = [(Slots(put(np.zeros(3 * 4096, dtype="u1")), 4096, 96), put(np.zeros(3, dtype="u4"))) for _ in streams]
    """)
    process = control.process(kernel_child.pid)
    process.hold()
    kernel_child.run("""
        for _ in range(20):
            for stream, (target, sums) in zip(streams, own):
                kernels.gather(region, blocks, target, stream=int(stream))
                kernels.checksums(target, 3, lengths, payload, sums, stream=int(stream))
    """)
    process.release()
    right = kernel_child.run("""
        twin = Twin()
        twin.kernels.gather(twin.region, twin.blocks(6, 1, 3), twin.slots)
        want = twin.checksums()
        for stream in streams:
            ok(cu.cuStreamSynchronize(stream))
        result = [get(sums, 3, "u4").tolist() == want for _, sums in own]
    """)
    assert right == [True] * 6


def test_kernels_reach_memory_of_other_processes_chunks_and_page_locked_memory(make_kernel_child: Callable[[], Child], kernel_child: Child) -> None:
    engine = make_kernel_child()
    handle = engine.run(f"{BEGIN}\nheld = put(memories[0]); result = memory_handle(held)")
    right = kernel_child.run(f"""
        properties, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
        properties.type, properties.location.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location, access.flags = properties.location, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        chunk, base = ok(cu.cuMemCreate(2 << 20, properties, 0)), int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)))
        ok(cu.cuMemMap(base, 2 << 20, 0, chunk, 0)); ok(cu.cuMemSetAccess(base, 2 << 20, [access], 1))
        ok(cu.cuMemcpyHtoD(base, memories[1].ctypes.data, memories[1].size))
        table = plane_table(layout, [int(ok(open_memory("{handle}"))), base])
        address, view = page_locked(3 * 4096)
        slots = Slots(address, 4096, 96)
        blocks = Blocks(3, put(np.array([6, 1, 3], dtype="u4")), put(ones(3)))
        kernels.gather(Region(put(table), len(table), 8, payload), blocks, slots, stream=int(a))
        ok(cu.cuStreamSynchronize(a))
        want = [memories[0][i * 1000 : i * 1000 + 1000].tobytes() + memories[1][24 + i * 2001 : 24 + i * 2001 + 2000].tobytes() for i in (6, 1, 3)]
        result = [bytes(view[i * 4096 + 96 : i * 4096 + 96 + payload]) == want[i] for i in range(3)]
    """)
    assert right == [True] * 3


@pytest.mark.parametrize("when", ["after a kernel", "while kernels are held"])
def test_host_code_that_touches_device_memory_still_dies(kernel_child: Child, control: Control, when: str) -> None:
    kernel_child.run(REGION)
    if when == "while kernels are held":
        control.process(kernel_child.pid).hold()
    kernel_child.run("kernels.gather(region, blocks, slots, stream=int(a))")
    if when == "after a kernel":
        kernel_child.run("ok(cu.cuStreamSynchronize(a))")
    kernel_child.start("ctypes.string_at(slots.base, 1)")
    with pytest.raises(RuntimeError, match="ended with -11"):
        kernel_child.finish()


def test_a_kernel_that_is_given_pageable_memory_fails_the_context(kernel_child: Child, control: Control) -> None:
    kernel_child.run(REGION)
    before = control.process(kernel_child.pid).counters
    answers = kernel_child.run("""
        flags = ones(3)
        kernels.gather(region, Blocks(3, blocks.indices, flags.ctypes.data), slots, stream=int(a))
        result = error(cu.cuStreamSynchronize(a)), error(cu.cuMemAlloc(1))
    """)
    assert answers == ["ILLEGAL_ADDRESS"] * 2
    assert (control.process(kernel_child.pid).counters - before).kernels == 0


@pytest.mark.parametrize("name", ["kernel", "kernel crc32c_pieces"])
def test_a_fault_of_one_kernel_or_of_all_fails_the_context(kernel_child: Child, control: Control, name: str) -> None:
    kernel_child.run(REGION)
    control.fail(name, LAUNCH_FAILED, skip=1 if name == "kernel" else 0)
    before = control.process(kernel_child.pid).counters
    state = kernel_child.run("kernels.checksums(slots, 3, lengths, payload, crcs, stream=int(a)); result = error(cu.cuStreamSynchronize(a))")
    assert state == "LAUNCH_FAILED"
    assert (control.process(kernel_child.pid).counters - before).kernels == 1
    refused = kernel_child.run("""
        try:
            kernels.checksums(slots, 3, lengths, payload, crcs, stream=int(a))
        except OSError as problem:
            cause = problem.__cause__
            result = [type(cause).__name__, str(cause), cause.status]
    """)
    assert refused == ["CUDADriverError", "CUDA_ERROR_LAUNCH_FAILED", LAUNCH_FAILED]


def test_sources_are_loaded_once_a_device_and_launched_there_whatever_is_current(make_kernel_child: Callable[[], Child], control: Control) -> None:
    child = make_kernel_child()
    current = child.run(
        BEGIN.replace("kernels = open_cupy_kernels(0)", "kernels = open_cupy_kernels(1); open_cupy_kernels(1)")
        + """
result = int(ok(cu.cuCtxGetDevice()))
"""
    )
    assert current == 0
    process = control.process(child.pid)
    assert (process.calls["cuModuleLoad"], process.calls["cuModuleGetFunction"], process.counters.host_to_device_copies) == (2, 5, 2)
    answers = child.run("""
        from crc32c import crc32c
        attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        tables = int(ok(cu.cuPointerGetAttribute(attribute, kernels._tables)))
        other = device_context(1)
        stream, data, lengths, crcs = ok(cu.cuStreamCreate(1)), put(np.arange(100, dtype="u1")), put(np.array([100], dtype="u8")), put(np.zeros(1, dtype="u4"))
        device_context(0)
        kernels.checksums(Slots(data, 0), 1, lengths, 100, crcs, stream=int(stream))
        still = int(ok(cu.cuCtxGetDevice()))
        device_context(1)
        ok(cu.cuStreamSynchronize(stream))
        result = tables, still, get(crcs, 1, "u4").tolist() == [crc32c(bytes(range(100)))]
    """)
    assert answers == [1, 0, True]


def test_kernels_and_streams_of_different_devices_are_refused(kernel_child: Child) -> None:
    kernel_child.run(REGION)
    answers = kernel_child.run("""
        device_context(1)
        foreign = ok(cu.cuStreamCreate(1))
        verify = kernels._launcher._functions["crc32c_verify"]._handle
        here = error(cu.cuLaunchKernel(verify, 1, 1, 1, 32, 1, 1, 0, foreign, ((0,) * 4, (ctypes.c_uint64,) * 4), 0))
        kernels.gather(region, blocks, slots, stream=int(foreign))
        result = here, error(cu.cuStreamSynchronize(foreign))
    """)
    assert answers == ["INVALID_HANDLE"] * 2


def test_launches_that_a_gpu_or_the_stand_in_can_not_take_are_refused(kernel_child: Child) -> None:
    answers = kernel_child.run("""
        verify = kernels._launcher._functions["crc32c_verify"]._handle
        def launched(*shape, shared=0, arguments=((0,) * 4, (ctypes.c_uint64,) * 4)):
            return error(cu.cuLaunchKernel(verify, *shape, shared, a, arguments, 0))
        result = [launched(*shape) for shape in [(0, 1, 1, 32, 1, 1), (1, 65536, 1, 32, 1, 1), (1, 1, 1, 1056, 1, 1), (1, 1, 2, 32, 1, 1), (1, 1, 1, 33, 1, 1)]]
        result += [launched(1, 1, 1, 32, 1, 1, shared=4), launched(1, 1, 1, 32, 1, 1, arguments=0)]
    """)
    assert answers == ["INVALID_VALUE"] * 3 + ["NOT_SUPPORTED"] * 3 + ["INVALID_VALUE"]


def test_modules_and_kernels_that_are_not_there_are_told(kernel_child: Child, kernels: Path) -> None:
    answers = kernel_child.run(f"""
        module = ok(cu.cuModuleLoad(b"{kernels}/copy.so"))
        result = [error(cu.cuModuleLoad(b"{kernels}/{{name}}".replace(b"{{name}}", name))) for name in (b"none.so", b"copy.cu")]
        result += [error(cu.cuModuleGetFunction(module, name)) for name in (b"gather", b"crc32c_begin")]
    """)
    assert answers == ["FILE_NOT_FOUND", "INVALID_IMAGE", "CUDA_SUCCESS", "NOT_FOUND"]


def test_the_double_takes_no_source_options_or_arguments_that_it_does_not_know(kernel_child: Child) -> None:
    messages = kernel_child.run("""
        import cupy
        from offloadd.transfer.kernels.source import OPTIONS, source
        def refusal(call):
            try:
                return f"no error: {call()}"
            except (TypeError, ValueError) as problem:
                return str(problem)
        result = [
            refusal(lambda: cupy.RawModule(code=source("copy.cu") + " ", options=OPTIONS)),
            refusal(lambda: cupy.RawModule(code=source("copy.cu"), options=OPTIONS[1:])),
            refusal(lambda: kernels._launcher._functions["gather"]((1, 1), (32,), (np.uint32(1),))),
        ]
    """)
    expected = ["this source is not among those", "compiled with other options", "is a uint32; a kernel"]
    assert [part in message for part, message in zip(expected, messages, strict=True)] == [True] * 3, messages


def test_without_kernels_in_the_environment_a_process_has_the_real_cupy_or_none(make_child: Callable[..., Child], kernel_child: Child) -> None:
    code = "import importlib.util; found = importlib.util.find_spec('cupy'); result = found and found.origin"
    assert kernel_child.run(code) == str(CUPY / "cupy" / "__init__.py")
    assert str(CUPY) not in str(make_child().run(code))


def test_kernels_are_built_once(kernels: Path) -> None:
    before = (kernels / "copy.so").stat().st_mtime_ns
    assert build_kernels(kernels.parent) == kernels
    assert (kernels / "copy.so").stat().st_mtime_ns == before


def test_without_gpp_the_build_of_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"need g\+\+"):
        build_kernels(tmp_path)
