"""What the stand-in driver does as a real one does: `-m gpu` runs the same tests on a GPU."""

from collections.abc import Callable

import pytest

from .child import Child

MakeChild = Callable[[], Child]


@pytest.fixture
def one(make_driver_child: MakeChild) -> Child:
    return make_driver_child()


@pytest.fixture
def engine(make_driver_child: MakeChild) -> Child:
    return make_driver_child()


@pytest.fixture
def mover(make_driver_child: MakeChild) -> Child:
    return make_driver_child()


def test_each_device_has_a_uuid_of_its_own_and_there_are_no_more_than_counted(one: Child) -> None:
    count, uuids, beyond = one.run("""
        count = ok(cu.cuDeviceGetCount())
        uuids = [bytes(ok(cu.cuDeviceGetUuid(ok(cu.cuDeviceGet(i)))).bytes).hex() for i in range(count)]
        result = count, uuids, error(cu.cuDeviceGet(count))
    """)
    assert count >= 1
    assert len(set(uuids)) == count
    assert beyond == "INVALID_DEVICE"


def test_calls_out_of_turn_are_refused(make_driver_child: MakeChild) -> None:
    child = make_driver_child()
    assert child.run("ok(cu.cuCtxSetCurrent(None)); result = error(cu.cuMemAlloc(4096))") == "INVALID_CONTEXT"


def test_bytes_go_to_the_device_and_back(one: Child) -> None:
    same, base_offset, byte_count, kind = one.run("""
        data = os.urandom(3_000_001)
        pointer = int(ok(cu.cuMemAlloc(len(data))))
        write(pointer, data)
        base, byte_count = ok(cu.cuMemGetAddressRange(pointer + 4096))
        kind = int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer + 100)))
        result = read(pointer, len(data)) == data, int(base) - pointer, byte_count, kind
        ok(cu.cuMemFree(pointer))
    """)
    assert same
    assert base_offset == 0
    assert byte_count >= 3_000_001
    assert kind == 2


def test_memory_that_cuda_does_not_know_has_no_attributes(one: Child) -> None:
    answer = one.run("""
        memory = ctypes.create_string_buffer(100)
        result = error(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ctypes.addressof(memory)))
    """)
    assert answer == "INVALID_VALUE"


def test_host_memory_is_registered_once(one: Child) -> None:
    answers = one.run("""
        import mmap
        memory = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        answers = [error(cu.cuMemHostUnregister(address)), error(cu.cuMemHostRegister(address, 1 << 20, 0)), error(cu.cuMemHostRegister(address, 1 << 20, 0))]
        kind = int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 5)))
        same = int(ok(cu.cuMemHostGetDevicePointer(address, 0))) == address
        result = answers, kind, same, error(cu.cuMemHostUnregister(address))
    """)
    assert answers == [["HOST_MEMORY_NOT_REGISTERED", "CUDA_SUCCESS", "HOST_MEMORY_ALREADY_REGISTERED"], 1, True, "CUDA_SUCCESS"]


def test_rows_and_batches_copy_exactly_what_they_name(one: Child) -> None:
    rows, batch = one.run("""
        def rows_copy(target, target_pitch, source, source_pitch, width, height, target_kind=2, source_kind=2):
            copy = cu.CUDA_MEMCPY2D()
            copy.dstMemoryType, copy.srcMemoryType = cu.CUmemorytype(target_kind), cu.CUmemorytype(source_kind)
            copy.dstPitch, copy.srcPitch, copy.WidthInBytes, copy.Height = target_pitch, source_pitch, width, height
            if target_kind == 1: copy.dstHost = target
            else: copy.dstDevice = target
            if source_kind == 1: copy.srcHost = source
            else: copy.srcDevice = source
            return copy

        data = bytes(range(256)) * 16
        a, b = int(ok(cu.cuMemAlloc(4096))), int(ok(cu.cuMemAlloc(4096)))
        address, view = page_locked(4096)
        view[:] = data
        stream = ok(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        # host (pitch 128) -> device (pitch 100) -> unified host (pitch 64), 32 bytes of 20 rows
        ok(cu.cuMemcpy2DAsync(rows_copy(a, 100, address, 128, 32, 20, 2, 1), stream))
        ok(cu.cuStreamSynchronize(stream))
        view[:] = bytes(4096)
        ok(cu.cuMemcpy2DAsync(rows_copy(address, 64, a, 100, 32, 20, 4, 4), stream))
        ok(cu.cuStreamSynchronize(stream))
        rows = all(bytes(view[64 * i:64 * i + 64]) == data[128 * i:128 * i + 32] + bytes(32) for i in range(20))

        write(a, data)
        ok(cu.cuMemsetD8Async(b, 7, 4096, stream))
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        pieces = [(0, 1000, 10), (500, 0, 100), (4000, 3000, 96)]
        ok(cu.cuMemcpyBatchAsync([cu.CUdeviceptr(b + t) for t, _, _ in pieces], [cu.CUdeviceptr(a + s) for _, s, _ in pieces],
                                 [n for _, _, n in pieces], 3, [attributes], [0], 1, stream))
        ok(cu.cuStreamSynchronize(stream))
        wanted = bytearray([7]) * 4096
        for t, s, n in pieces:
            wanted[t:t + n] = data[s:s + n]
        result = rows, read(b, 4096) == wanted
    """)
    assert rows
    assert batch


def test_a_batch_needs_a_stream_of_its_own(one: Child) -> None:
    answer = one.run("""
        a = int(ok(cu.cuMemAlloc(4096)))
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        result = error(cu.cuMemcpyBatchAsync([cu.CUdeviceptr(a)], [cu.CUdeviceptr(a + 2048)], [100], 1, [attributes], [0], 1, cu.CUstream(0)))
    """)
    assert answer == "INVALID_VALUE"


def test_host_functions_run_in_stream_order_and_may_not_call_the_driver(one: Child) -> None:
    seen = one.run("""
        seen = []
        address, view = page_locked(4)
        pointer = int(ok(cu.cuMemAlloc(4)))
        first = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(view[0]))
        second = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.extend([view[0], error(cu.cuMemAlloc(4))]))
        stream = ok(cu.cuStreamCreateWithPriority(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING), -1))
        ok(cu.cuMemsetD8Async(pointer, 9, 4, stream))
        ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(ctypes.cast(first, ctypes.c_void_p).value), 0))
        ok(cu.cuMemcpyDtoHAsync(address, pointer, 4, stream))
        ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(ctypes.cast(second, ctypes.c_void_p).value), 0))
        ok(cu.cuStreamSynchronize(stream))
        result = seen
    """)
    assert seen == [0, 9, "NOT_PERMITTED"]


def test_values_in_memory_order_streams(one: Child) -> None:
    before, after = one.run("""
        flag, target = int(ok(cu.cuMemAlloc(16))), int(ok(cu.cuMemAlloc(16)))
        ok(cu.cuMemsetD8(flag, 0, 16)); ok(cu.cuMemsetD8(target, 0, 16)); ok(cu.cuCtxSynchronize())
        waiting, writing = (ok(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))) for _ in range(2))
        ok(cu.cuStreamWaitValue64(waiting, flag + 8, 5, int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)))
        ok(cu.cuMemsetD8Async(target, 1, 16, waiting))
        before = error(cu.cuStreamQuery(waiting))
        ok(cu.cuStreamWriteValue64(writing, flag + 8, 6, 0))
        ok(cu.cuStreamSynchronize(waiting))
        result = before, read(target, 1)[0]
    """)
    assert before == "NOT_READY"
    assert after == 1


# ---- between processes ----


def test_another_process_reads_and_writes_an_allocation(engine: Child, mover: Child) -> None:
    handle = engine.run("""
        pointer = int(ok(cu.cuMemAlloc(8 << 20)))
        data = os.urandom(8 << 20)
        write(pointer, data)
        result = memory_handle(pointer)
    """)
    mover.run(f"""
        opened = int(ok(open_memory("{handle}")))
        ok(cu.cuMemcpyDtoD(opened + (4 << 20), opened, 1 << 20))
        ok(cu.cuCtxSynchronize())
    """)
    assert engine.run("result = read(pointer + (4 << 20), 1 << 20) == data[:1 << 20]")
    assert mover.run("result = error(cu.cuIpcCloseMemHandle(opened))") == "CUDA_SUCCESS"


def test_a_handle_opened_twice_gives_one_mapping_that_is_closed_twice(engine: Child, mover: Child) -> None:
    handle = engine.run("pointer = int(ok(cu.cuMemAlloc(8 << 20))); result = memory_handle(pointer)")
    answers = mover.run(f"""
        first, second = int(ok(open_memory("{handle}"))), int(ok(open_memory("{handle}")))
        result = first == second, [error(cu.cuIpcCloseMemHandle(first)) for _ in range(3)]
    """)
    assert answers == [True, ["CUDA_SUCCESS", "CUDA_SUCCESS", "INVALID_VALUE"]]


def test_a_process_can_not_open_its_own_handles(one: Child) -> None:
    answers = one.run("""
        event = ok(cu.cuEventCreate(6))
        result = [error(open_memory(memory_handle(ok(cu.cuMemAlloc(1 << 20))))), error(open_event(event_handle(event)))]
    """)
    assert answers == ["INVALID_CONTEXT", "INVALID_CONTEXT"]


def test_handles_of_a_dead_process_can_not_be_opened(engine: Child, mover: Child) -> None:
    memory, event = engine.run("""
        result = [memory_handle(ok(cu.cuMemAlloc(1 << 20))), event_handle(ok(cu.cuEventCreate(6)))]
    """)
    engine.kill()
    answers = mover.run(f"""
        result = [error(open_memory("{memory}")), error(open_event("{event}"))]
    """)
    assert "CUDA_SUCCESS" not in answers


def test_events_order_streams_of_two_processes(engine: Child, mover: Child) -> None:
    memory, event = engine.run("""
        pointer = int(ok(cu.cuMemAlloc(1 << 20)))
        ok(cu.cuMemsetD8(pointer, 0, 1 << 20)); ok(cu.cuCtxSynchronize())
        event = ok(cu.cuEventCreate(6))
        stream = ok(cu.cuStreamCreate(1))
        # A gate that only this process opens, so that the event can't be done yet.
        ok(cu.cuStreamWaitValue32(stream, pointer, 1, 0))
        ok(cu.cuMemsetD8Async(pointer + 4096, 77, 4096, stream))
        ok(cu.cuEventRecord(event, stream))
        result = [memory_handle(pointer), event_handle(event)]
    """)
    before = mover.run(f"""
        opened, ready = int(ok(open_memory("{memory}"))), ok(open_event("{event}"))
        stream = ok(cu.cuStreamCreate(1))
        address, view = page_locked(4096)
        ok(cu.cuStreamWaitEvent(stream, ready, 0))
        ok(cu.cuMemcpyDtoHAsync(address, opened + 4096, 4096, stream))
        result = error(cu.cuEventQuery(ready)), error(cu.cuStreamQuery(stream)), view[0]
    """)
    assert before == ["NOT_READY", "NOT_READY", 0]
    engine.run("gate = ok(cu.cuStreamCreate(1)); ok(cu.cuStreamWriteValue32(gate, pointer, 1, 0))")
    assert mover.run("ok(cu.cuStreamSynchronize(stream)); result = error(cu.cuEventQuery(ready)), view[0]") == ["CUDA_SUCCESS", 77]


VMM = """
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    access = cu.CUmemAccessDesc()
    access.location, access.flags = properties.location, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def map_chunks(chunks):
        base = int(ok(cu.cuMemAddressReserve(chunk_bytes * len(chunks), 0, 0, 0)))
        for i, chunk in enumerate(chunks):
            ok(cu.cuMemMap(base + i * chunk_bytes, chunk_bytes, 0, chunk, 0))
        ok(cu.cuMemSetAccess(base, chunk_bytes * len(chunks), [access], 1))
        return base
"""


def test_chunks_travel_by_descriptor_and_are_one_range_in_the_other_process(engine: Child, mover: Child, tmp_path_factory: pytest.TempPathFactory) -> None:
    address = tmp_path_factory.mktemp("s") / "s"
    engine.run(VMM)
    mover.run(VMM)
    chunk_bytes = engine.run("""
        properties.requestedHandleTypes = POSIX
        chunk_bytes = ok(cu.cuMemGetAllocationGranularity(properties, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        chunks = [ok(cu.cuMemCreate(chunk_bytes, properties, 0)) for _ in range(3)]
        base = map_chunks(chunks)
        data = os.urandom(3 * chunk_bytes)
        write(base, data)
        result = chunk_bytes
    """)
    ranges = engine.run("result = [int(x) for x in ok(cu.cuMemGetAddressRange(base + chunk_bytes + 5))], base")
    assert ranges == [[ranges[1] + chunk_bytes, chunk_bytes], ranges[1]]
    engine.run(f"""
        import socket
        server = socket.socket(socket.AF_UNIX)
        server.bind({str(address)!r})
        server.listen()
    """)
    engine.start("""
        connection, _ = server.accept()
        descriptors = [int(ok(cu.cuMemExportToShareableHandle(chunk, POSIX, 0))) for chunk in chunks]
        socket.send_fds(connection, [b"3"], descriptors)
        [os.close(descriptor) for descriptor in descriptors]
    """)
    mover.run(f"""
        import socket
        client = socket.socket(socket.AF_UNIX)
        client.connect({str(address)!r})
        _, descriptors, _, _ = socket.recv_fds(client, 16, 3)
        chunk_bytes = {chunk_bytes}
        imported = [ok(cu.cuMemImportFromShareableHandle(descriptor, POSIX)) for descriptor in descriptors]
        [os.close(descriptor) for descriptor in descriptors]
        base = map_chunks(imported)
        [ok(cu.cuMemRelease(chunk)) for chunk in imported]  # the mapping holds them
        # Over the border of two chunks, in one copy.
        ok(cu.cuMemcpyDtoD(base, base + chunk_bytes - 1000, 5000)); ok(cu.cuCtxSynchronize())
    """)
    engine.finish()
    assert engine.run("result = read(base, 5000) == data[chunk_bytes - 1000:chunk_bytes + 4000]")
    assert mover.run("result = [error(cu.cuMemUnmap(base, 3 * chunk_bytes)), error(cu.cuMemAddressFree(base, 3 * chunk_bytes))]") == ["CUDA_SUCCESS"] * 2


def test_chunks_that_were_not_made_for_it_can_not_leave_the_process(one: Child) -> None:
    one.run(VMM)
    export, legacy, kinds = one.run("""
        chunk_bytes = ok(cu.cuMemGetAllocationGranularity(properties, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        chunk = ok(cu.cuMemCreate(chunk_bytes, properties, 0))
        base = map_chunks([chunk])
        capable = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        kinds = [bool(ok(cu.cuPointerGetAttribute(capable, pointer))) for pointer in (base, ok(cu.cuMemAlloc(1 << 20)))]
        result = error(cu.cuMemExportToShareableHandle(chunk, POSIX, 0)), error(cu.cuIpcGetMemHandle(base)), kinds
    """)
    assert "CUDA_SUCCESS" not in (export, legacy)
    assert kinds == [False, True]


def test_managed_memory_can_not_be_exported(one: Child) -> None:
    managed, answer = one.run("""
        pointer = int(ok(cu.cuMemAllocManaged(1 << 20, 1)))
        result = bool(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer))), error(cu.cuIpcGetMemHandle(pointer))
    """)
    assert managed
    assert answer == "INVALID_VALUE"
