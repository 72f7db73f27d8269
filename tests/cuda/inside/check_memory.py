"""Memory of our own and of other processes: what is mapped, what is refused, and that nothing is left."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator

import pytest

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError, check, load
from offloadd.cuda.imports import IpcImports, VmmChunk, VmmMemory
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.streams import Event, Stream
from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import Mapping, map_private

from ...standin.controls import Control, Loaded, Process, wait_until
from ...standin_tests.child import Child

MIB = 1 << 20
ONLY_US = {"contexts_now": 1}
TIMEOUT_S = 120.0

# ---- our own ----


def test_memory_that_the_gpu_has_not_got_is_refused_with_the_figures(device: Device, control: Control) -> None:
    memory = DeviceMemory.allocate(device, 3 * MIB)
    with pytest.raises(CudaError, match=rf"allocate {1 << 30} bytes on cuda:0 .*OUT_OF_MEMORY.*{(1 << 30) - 3 * MIB} of {1 << 30} bytes are free"):
        DeviceMemory.allocate(device, 1 << 30)
    with pytest.raises(ValueError, match="0 bytes can't be allocated"):
        DeviceMemory.allocate(device, 0)
    memory.close()
    memory.close()
    assert control.process().counters.held == ONLY_US


@pytest.fixture
def host() -> Iterator[Mapping]:
    mapping = map_private(4 * MIB)
    yield mapping
    mapping.close()


def test_host_memory_is_page_locked_in_chunks(device: Device, ours: Process, host: Mapping) -> None:
    calls = ours.calls.get("cuMemHostRegister", 0)
    registration = HostRegistration.register(device, host.bytes.ctypes.data, 4 * MIB - 4096, chunk_bytes=MIB)
    held = ours.counters.held
    assert (ours.calls["cuMemHostRegister"] - calls, held["host_registrations_now"], held["host_registered_bytes_now"]) == (4, 4, 4 * MIB - 4096)
    assert registration.registered_bytes == 4 * MIB - 4096
    registration.close()
    registration.close()
    assert ours.counters.held == ONLY_US


def test_a_refused_chunk_names_its_bytes_and_leaves_nothing(device: Device, ours: Process, control: Control, host: Mapping) -> None:
    address = host.bytes.ctypes.data
    with control.fail("cuMemHostRegister", 2, skip=2), pytest.raises(CudaError) as raised:
        HostRegistration.register(device, address, 4 * MIB, chunk_bytes=MIB)
    wanted = f"page-lock {MIB} bytes of host memory at {address + 2 * MIB:#x} ({2 * MIB} of {4 * MIB} bytes were done): CUDA_ERROR_OUT_OF_MEMORY"
    assert wanted in str(raised.value) and "RLIMIT_MEMLOCK is " in str(raised.value)
    assert ours.counters.held == ONLY_US


@pytest.mark.parametrize(("shift", "size", "chunk"), [(1, MIB, MIB), (0, MIB, mmap.PAGESIZE + 1), (0, MIB, 0), (0, 0, MIB)])
def test_memory_that_is_no_pages_is_not_page_locked(device: Device, host: Mapping, shift: int, size: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"{size if not size else chunk} bytes can't be page-locked"):
        HostRegistration.register(device, host.bytes.ctypes.data + shift, size, chunk_bytes=chunk)


# ---- IPC ----


def exported(engine: Child, size_bytes: int = MIB) -> bytes:
    """A handle of memory that holds 42s."""
    return bytes.fromhex(engine.run(f"p = ok(cu.cuMemAlloc({size_bytes})); write(p, b'\\x2a' * {size_bytes}); result = memory_handle(p)"))


def test_memory_of_an_engine_is_opened_once_and_closed_with_the_last_reference(device: Device, ours: Process, engine: Child, loaded: Loaded) -> None:
    imports = IpcImports(device)
    handle = exported(engine)
    first, second = imports.open(handle), imports.open(handle)
    assert (first.address, first.size_bytes) == (second.address, second.size_bytes) and first.size_bytes == MIB
    assert ours.counters.memory_handles_open_now == 1
    view = loaded.host_view(first.address, MIB)
    assert view[MIB - 1] == 42
    view[0] = 43
    assert engine.run("result = list(read(p, 2))") == [43, 42]
    first.close()
    first.close()
    assert ours.counters.memory_handles_open_now == 1
    second.close()
    assert ours.counters.held == ONLY_US
    again = imports.open(handle)
    assert ours.counters.memory_handles_open_now == 1
    again.close()


def test_memory_outlives_its_engine_until_it_is_closed_and_can_not_be_opened_anew(device: Device, engine: Child) -> None:
    imports = IpcImports(device)
    handle = exported(engine)
    memory = imports.open(handle)
    engine.kill()
    imports.open(handle).close()
    memory.close()
    with pytest.raises(CudaError, match=r"open a CUDA IPC memory handle on cuda:0 .*MAP_FAILED.*the process that exported it has ended"):
        imports.open(handle)


def test_a_handle_of_this_process_is_refused(device: Device) -> None:
    memory = DeviceMemory.allocate(device, MIB)
    raw = check(load().cuIpcGetMemHandle(memory.address), "export")
    with pytest.raises(CudaError, match="exported by this very process"):
        IpcImports(device).open(ctypes.string_at(raw.getPtr(), 64))
    memory.close()


def test_memory_of_another_gpu_is_refused_and_closed(device: Device, ours: Process, make_engine: Callable[[int], Child]) -> None:
    with pytest.raises(InvalidRequest, match=r"memory of cuda:1; this mover works on cuda:0"):
        IpcImports(device).open(exported(make_engine(1)))
    assert ours.counters.held == ONLY_US


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_of_another_length_is_refused(device: Device, size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"memory handle has {size} bytes; it must have 64"):
        IpcImports(device).open(bytes(size))
    with pytest.raises(InvalidRequest, match=f"event handle has {size} bytes; it must have 64"):
        Event.open(device, bytes(size))


@pytest.mark.parametrize("function", ["cuIpcOpenMemHandle", "cuPointerGetAttribute", "cuMemGetAddressRange"])
def test_a_handle_that_can_not_be_opened_leaves_nothing(device: Device, ours: Process, control: Control, engine: Child, function: str) -> None:
    imports, handle = IpcImports(device), exported(engine)
    with control.fail(function, 999, times=1, pid=ours.pid), pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        imports.open(handle)
    assert ours.counters.held == ONLY_US
    imports.open(handle).close()


# ---- events between processes ----


def test_our_stream_waits_for_the_event_of_an_engine(device: Device, ours: Process, control: Control, engine: Child) -> None:
    engine.run("e = ok(cu.cuEventCreate(6)); s = ok(cu.cuStreamCreate(1))")
    event, stream = Event.open(device, bytes.fromhex(engine.run("result = event_handle(e)"))), Stream.create(device)
    control.process(engine.pid).hold()
    engine.run("ok(cu.cuEventRecord(e, s))")
    stream.wait(event)
    with pytest.raises(TimeoutError):
        stream.synchronize(0.02)
    control.process(engine.pid).release()
    stream.synchronize(TIMEOUT_S)
    assert event.is_done()
    assert ours.counters.event_handles_open_now == 1
    event.close()
    stream.close()


def test_our_streams_do_not_wait_for_the_default_stream(device: Device, control: Control, engine: Child) -> None:
    """A library that queues work there, or waits there for an engine, does not hold up ours."""
    engine.run("e = ok(cu.cuEventCreate(6)); s = ok(cu.cuStreamCreate(1))")
    event, stream = Event.open(device, bytes.fromhex(engine.run("result = event_handle(e)"))), Stream.create(device)
    control.process(engine.pid).hold()
    engine.run("ok(cu.cuEventRecord(e, s))")
    check(load().cuStreamWaitEvent(0, event.handle, 0), "wait in the default stream")
    stream.synchronize(TIMEOUT_S)
    assert not event.is_done()
    control.process(engine.pid).release()
    check(load().cuStreamSynchronize(0), "end the default stream's wait")
    event.close()
    stream.close()


def test_an_engine_waits_for_our_event(device: Device, ours: Process, engine: Child) -> None:
    event, stream = Event.create(device, interprocess=True), Stream.create(device)
    engine.run(f"e = ok(open_event('{event.ipc_handle().hex()}')); s = ok(cu.cuStreamCreate(1))")
    ours.hold()
    stream.record(event)
    assert engine.run("ok(cu.cuStreamWaitEvent(s, e, 0)); result = error(cu.cuStreamQuery(s))") == "NOT_READY"
    ours.release()
    wait_until(lambda: engine.run("result = error(cu.cuStreamQuery(s))") == "CUDA_SUCCESS", "the engine's stream to go on")
    stream.close()
    event.close()


def test_events_of_dead_processes_and_our_own_are_refused(device: Device, ours: Process, engine: Child) -> None:
    event = Event.create(device, interprocess=True)
    with pytest.raises(CudaError, match="exported by this very process"):
        Event.open(device, event.ipc_handle())
    event.close()
    handle = bytes.fromhex(engine.run("result = event_handle(ok(cu.cuEventCreate(6)))"))
    engine.kill()
    with pytest.raises(CudaError, match=r"open a CUDA IPC event handle on cuda:0 .*has ended, or shares neither /dev/shm"):
        Event.open(device, handle)
    assert ours.counters.held == ONLY_US


# ---- virtual memory chunks ----

MAKE_CHUNKS = """
properties = cu.CUmemAllocationProp()
properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
properties.location.id = {ordinal}
kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
properties.requestedHandleTypes = kind
result = []
for size in {sizes}:
    result.append(int(ok(cu.cuMemExportToShareableHandle(ok(cu.cuMemCreate(size, properties, 0)), kind, 0))))
"""


@pytest.fixture
def chunks(engine: Child) -> Iterator[list[VmmChunk]]:
    made = chunks_of(engine, [2 * MIB, 4 * MIB])
    yield made
    for chunk in made:
        os.close(chunk.fd)


def chunks_of(engine: Child, sizes: list[int], ordinal: int = 0) -> list[VmmChunk]:
    fds = engine.run(MAKE_CHUNKS.format(sizes=sizes, ordinal=ordinal))
    return [VmmChunk(os.open(f"/proc/{engine.pid}/fd/{fd}", os.O_RDWR), size) for fd, size in zip(fds, sizes, strict=True)]


def test_chunks_are_mapped_side_by_side(device: Device, ours: Process, loaded: Loaded, chunks: list[VmmChunk]) -> None:
    memory, again = VmmMemory.open(device, chunks), VmmMemory.open(device, chunks[1:])
    assert (memory.size_bytes, again.size_bytes) == (6 * MIB, 4 * MIB)
    assert ours.counters.held == {**ONLY_US, "reservations_now": 2, "mappings_now": 3}
    loaded.host_view(memory.address + 2 * MIB, 1)[0] = 99
    assert loaded.host_view(again.address, 1)[0] == 99
    for one in (memory, again):
        one.close()
        one.close()
    assert ours.counters.held == ONLY_US


@pytest.mark.parametrize(
    "function",
    [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
@pytest.mark.parametrize("skip", [0, 1])
def test_chunks_that_can_not_be_mapped_leave_nothing(device: Device, ours: Process, control: Control, chunks: list[VmmChunk], function: str, skip: int) -> None:
    with control.fail(function, 999, skip=skip, times=1, pid=ours.pid) as fault:
        if skip and function in ("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemSetAccess"):
            VmmMemory.open(device, chunks).close()  # these are called once for all chunks
        with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
            VmmMemory.open(device, chunks)
        assert fault.hits == 1
    assert ours.counters.held == ONLY_US


def test_a_size_that_is_no_multiple_of_the_granularity_is_refused(device: Device, ours: Process, chunks: list[VmmChunk]) -> None:
    for size in (0, MIB, -2 * MIB):
        with pytest.raises(InvalidRequest, match=f"chunk 1 has {size} bytes; it must be a multiple of {2 * MIB}, the granularity of cuda:0"):
            VmmMemory.open(device, [chunks[0], VmmChunk(chunks[1].fd, size)])
    with pytest.raises(InvalidRequest, match="memory of 0 chunks"):
        VmmMemory.open(device, [])
    assert ours.counters.held == ONLY_US


def test_a_chunk_smaller_than_announced_is_refused(device: Device, ours: Process, chunks: list[VmmChunk]) -> None:
    with pytest.raises(CudaError, match=f"map chunk 1: CUDA_ERROR_INVALID_VALUE.*it must have {8 * MIB} bytes at least"):
        VmmMemory.open(device, [chunks[0], VmmChunk(chunks[1].fd, 8 * MIB)])
    assert ours.counters.held == ONLY_US


def test_a_descriptor_that_is_no_chunk_is_refused(device: Device, ours: Process) -> None:
    fd = os.memfd_create("no chunk")
    with pytest.raises(CudaError, match=f"import chunk 0 of {2 * MIB} bytes from descriptor {fd} on cuda:0.*must come from cuMemExportToShareableHandle"):
        VmmMemory.open(device, [VmmChunk(fd, 2 * MIB)])
    os.close(fd)
    assert ours.counters.held == ONLY_US


def test_a_chunk_of_another_gpu_is_refused(device: Device, ours: Process, make_engine: Callable[[int], Child]) -> None:
    [chunk] = chunks_of(make_engine(1), [2 * MIB], ordinal=1)
    with pytest.raises(InvalidRequest, match="chunk 0 is memory of cuda:1; this mover works on cuda:0"):
        VmmMemory.open(device, [chunk])
    os.close(chunk.fd)
    assert ours.counters.held == ONLY_US
