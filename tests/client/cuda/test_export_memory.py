"""GPU memory exported by the client and opened by another process through the driver alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offloadd.client.cuda import export_memory
from offloadd.client.cuda.memory import _Pointer, _refuse_foreign, _tensor_range
from offloadd.errors import InvalidRequest

from ...standin.controls import Control
from ...standin_tests.child import Child

MIB = 1 << 20


def opened(mover: Child, facts: dict[str, Any], expected: str) -> bool:
    """Whether another process finds `expected` (hexadecimal) where the memory begins."""
    return bool(
        mover.run(f"""
            base = int(ok(open_memory({facts["handle"]!r})))
            result = read(base + {facts["offset"]}, {len(expected) // 2}).hex() == {expected!r}
            ok(cu.cuIpcCloseMemHandle(base))
        """)
    )


def test_an_exported_pointer_shows_the_same_bytes_elsewhere(engine: Child, mover: Child) -> None:
    exported, data = engine.run(f"""
        base = int(ok(cu.cuMemAlloc({8 * MIB})))
        data = os.urandom(4096)
        write(base + 12345, data)
        result = facts(export_pointer(base + 12345, {MIB})), data.hex()
    """)
    assert (exported["bytes"], exported["offset"], exported["allocation"], exported["chunks"]) == (MIB, 12345, 8 * MIB, [])
    assert opened(mover, exported, data)
    # And what the other side writes, as a restore does, the engine sees.
    mover.run(f"base = int(ok(open_memory({exported['handle']!r}))); write(base + {exported['offset']}, b'restored')")
    assert engine.run("result = read(base + 12345, 8).decode()") == "restored"


def test_a_tensor_inside_a_segment_begins_at_its_first_element(engine: Child, mover: Child) -> None:
    exported, data = engine.run(f"""
        segment = int(ok(cu.cuMemAlloc({20 * MIB})))
        tensor = Tensor(segment + {3 * MIB}, (2, 64, 1024), item_bytes=2)
        data = os.urandom(2 * 64 * 1024 * 2)
        write(tensor.address, data)
        result = facts(export_memory(tensor)), data.hex()
    """)
    assert (exported["bytes"], exported["offset"], exported["allocation"]) == (2 * 64 * 1024 * 2, 3 * MIB, 20 * MIB)
    assert opened(mover, exported, data)


def test_tensors_of_one_segment_are_exported_by_one_handle(engine: Child) -> None:
    one, other = engine.run(f"""
        segment = int(ok(cu.cuMemAlloc({20 * MIB})))
        result = [facts(export_memory(Tensor(segment + offset, (4096,)))) for offset in (0, {MIB})]
    """)
    assert one["handle"] == other["handle"]
    assert (one["offset"], other["offset"]) == (0, MIB)


def test_arrays_are_exported_with_the_gaps_of_their_strides(engine: Child, mover: Child) -> None:
    dense, gaps, rows, data = engine.run(f"""
        base = int(ok(cu.cuMemAlloc({2 * MIB})))
        data = os.urandom(4096)
        write(base + 512, data)
        made = [array(base + 512, (16, 64), "<f4"), array(base + 512, (16, 64), "<f4", (1024, 4)), Tensor(base + 512, (16, 64), (256, 1), 4)]
        result = [facts(export_memory(one)) for one in made] + [data.hex()]
    """)
    assert (dense["bytes"], dense["offset"]) == (4096, 512)
    assert gaps["bytes"] == rows["bytes"] == 15 * 1024 + 256
    assert opened(mover, dense, data)


def test_the_device_is_named_by_the_uuid_that_the_engine_sees_as_another_ordinal(make_standin: Callable[..., Child]) -> None:
    engine, mover = make_standin(CUDA_VISIBLE_DEVICES="1"), make_standin()
    exported = engine.run("""
        base = int(ok(cu.cuMemAlloc(1 << 20)))
        result = facts(export_pointer(base, 4096, device=0))
    """)
    uuids = mover.run("result = [ok(cu.cuDeviceGetUuid(ordinal)).bytes.hex() for ordinal in (0, 1)]")
    assert exported["uuid"].replace("-", "").removeprefix("GPU").lower() == uuids[1] != uuids[0]
    mover.run("device_context(1)")
    assert opened(mover, exported, "00" * 16)


def test_memory_of_a_device_is_exported_from_any_thread(engine: Child) -> None:
    exported = engine.run("""
        import threading
        base, found = int(ok(cu.cuMemAlloc(1 << 20))), []
        def work():
            found.extend([facts(export_pointer(base, 4096)), int(ok(cu.cuCtxGetCurrent()))])
        thread = threading.Thread(target=work); thread.start(); thread.join()
        result = found
    """)
    assert exported[0]["bytes"] == 4096
    assert exported[1] == 0, "the thread has a context that it did not have before"


def test_ranges_that_are_no_part_of_one_allocation_are_refused(engine: Child) -> None:
    past, other_device, empty, negative, high, nowhere = engine.run(f"""
        base = int(ok(cu.cuMemAlloc({2 * MIB})))
        export_pointer(base + 4096, {2 * MIB} - 4096)
        result = [
            refusal(export_pointer, base + 4097, {2 * MIB} - 4096),
            refusal(export_pointer, base, 4096, device=1),
            refusal(export_memory, Tensor(base, (0, 16))),
            refusal(export_pointer, -1, 4096),
            refusal(export_pointer, (1 << 64) - 4095, 4096),
            refusal(export_pointer, 4096, 4096),
        ]
    """)
    assert past.startswith("InvalidRequest:") and f"that has {2 * MIB} bytes" in past and "at byte 4097" in past
    assert other_device.startswith("InvalidRequest:") and "is on device 0; device 1 was named" in other_device
    assert empty.startswith("InvalidRequest: 0 bytes")
    assert negative.startswith("InvalidRequest: 4096 bytes at address -0x1")
    assert high.startswith("InvalidRequest: 4096 bytes at address 0xfffffffffffff001")
    assert nowhere.startswith("InvalidRequest:") and "no memory that CUDA allocated" in nowhere


def test_host_and_managed_memory_is_refused_by_its_kind(engine: Child) -> None:
    managed, locked, pageable = engine.run("""
        pageable = ctypes.create_string_buffer(4096)
        addresses = [int(ok(cu.cuMemAllocManaged(1 << 20, 1))), page_locked(4096)[0], ctypes.addressof(pageable)]
        result = [refusal(export_pointer, address, 4096) for address in addresses]
    """)
    assert managed.startswith("InvalidRequest:") and "cudaMallocManaged" in managed and "use cudaMalloc" in managed
    assert locked.startswith("InvalidRequest:") and "page-locked host memory" in locked and "HostMemory" in locked
    assert pageable.startswith("InvalidRequest:") and "no memory that CUDA allocated" in pageable


def test_things_that_are_no_writable_gpu_arrays_are_refused(engine: Child) -> None:
    cpu, nothing, read_only, backwards = engine.run("""
        base = int(ok(cu.cuMemAlloc(1 << 20)))
        made = [Tensor(base, (16,), device="cpu"), b"bytes", array(base, (16,), read_only=True), array(base + 15, (16,), strides=(-1,))]
        result = [refusal(export_memory, one) for one in made]
    """)
    assert cpu.startswith("InvalidRequest:") and "'cuda' is needed" in cpu and "HostMemory" in cpu
    assert nothing.startswith("InvalidRequest: a bytes has neither")
    assert read_only.startswith("InvalidRequest:") and "read-only" in read_only
    assert backwards.startswith("InvalidRequest:") and "(-1,)" in backwards


def test_memory_opened_from_another_process_is_not_exported_again(engine: Child, mover: Child) -> None:
    exported = engine.run("result = facts(export_pointer(int(ok(cu.cuMemAlloc(1 << 20))), 4096))")
    answer = mover.run(f"result = refusal(export_pointer, int(ok(open_memory({exported['handle']!r}))), 4096)")
    assert not answer.startswith("no error")


def test_memory_of_a_pool_is_refused_with_the_setting_that_helps() -> None:
    device = _Pointer(context=1, memory_type=2, managed=False, device=0, ipc_capable=False, handle_types=1, pool=0)
    _refuse_foreign(device, 4096)
    pool = _Pointer(context=1, memory_type=2, managed=False, device=0, ipc_capable=False, handle_types=1, pool=77)
    with pytest.raises(InvalidRequest, match=r"0x1000 is from a memory pool \(cudaMallocAsync\).*backend:native.*MemoryPool\(\)\.malloc"):
        _refuse_foreign(pool, 4096)


def test_virtual_memory_over_several_chunks_is_one_range_elsewhere(engine: Child, mover: Child, tmp_path_factory: pytest.TempPathFactory) -> None:
    socket_path = str(tmp_path_factory.mktemp("s") / "s")
    mover.run(f"receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind({socket_path!r})")
    exported, data, size, fds = engine.run(f"""
        size = granularity()
        base = expandable_segment([size, 2 * size, size, size])
        # From the middle of the second chunk into the third.
        tensor = Tensor(base + 2 * size, (size + 5000,))
        data = os.urandom(size + 5000)
        write(tensor.address, data)
        before = open_fds()
        with export_memory(tensor) as memory:
            inheritable = [os.get_inheritable(fd) for fd in memory.fds]
            send({socket_path!r}, memory)
            result = facts(memory), data.hex(), size, inheritable
        assert open_fds() == before
    """)
    assert exported["chunks"] == [2 * size, size]
    assert fds == [False, False]
    assert (exported["bytes"], exported["offset"], exported["allocation"], exported["handle"]) == (size + 5000, size, 3 * size, "")
    mover.run(f"base = open_chunks(receiver, {exported['chunks']})")
    assert mover.run(f"result = read(base + {exported['offset']}, {exported['bytes']}).hex()") == data
    mover.run(f"write(base + {exported['offset']}, b'restored')")
    assert engine.run("result = read(tensor.address, 8).decode()") == "restored"


def test_virtual_memory_that_was_not_made_for_descriptors_is_refused_and_leaves_none_open(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    all_bare, second_bare = engine.run("""
        size, none = granularity(), cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        bare, mixed = expandable_segment([size], [none]), expandable_segment([size, size], [POSIX, none])
        before = open_fds()
        result = refusal(export_pointer, bare, size), refusal(export_pointer, mixed, 2 * size)
        assert open_fds() == before
    """)
    for answer in (all_bare, second_bare):
        assert answer.startswith("InvalidRequest:") and "(cuMemCreate)" in answer and "expandable_segments:False" in answer
    assert control.process(engine.pid).counters.allocation_handles_now == 0


def test_virtual_memory_that_ends_early_is_refused_and_leaves_no_descriptor_open(engine: Child) -> None:
    size, gap = engine.run("""
        size = granularity()
        base = int(ok(cu.cuMemAddressReserve(4 * size, 0, 0, 0)))
        ok(cu.cuMemMap(base, size, 0, ok(cu.cuMemCreate(size, properties(POSIX), 0)), 0))
        before = open_fds()
        result = size, refusal(export_pointer, base + 10, 2 * size)
        assert open_fds() == before
    """)
    assert gap.startswith("InvalidRequest:") and f"only {size - 10} of {2 * size} bytes" in gap


def test_a_range_of_more_chunks_than_one_message_carries_is_refused(engine: Child) -> None:
    fits, answer = engine.run("""
        size = granularity()
        base = expandable_segment([size] * (CHUNKS_MAX + 1))
        before = open_fds()
        with export_pointer(base, CHUNKS_MAX * size) as memory:
            fits = len(memory.fds) == len(set(memory.fds)) == CHUNKS_MAX
        result = fits, refusal(export_pointer, base, CHUNKS_MAX * size + 1)
        assert open_fds() == before
    """)
    assert fits
    assert answer.startswith("InvalidRequest:") and "more than 253 physical chunks" in answer and "expandable_segments:False" in answer


def test_a_chunk_that_gives_no_descriptor_is_an_error_that_leaves_none_open(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("size = granularity(); base = expandable_segment([size] * 3); before = open_fds()")
    with control.fail("cuMemExportToShareableHandle", 304, skip=2):
        answer = engine.run("result = refusal(export_pointer, base, 3 * size)")
    assert answer.startswith("PathUnavailable:") and "CUDA_ERROR_OPERATING_SYSTEM" in answer and "may open" in answer
    assert engine.run("result = open_fds() == before")
    assert control.process(engine.pid).counters.allocation_handles_now == 0


def test_a_memory_keeps_its_tensor_and_its_descriptors_until_it_is_closed_or_forgotten(engine: Child) -> None:
    alive, open_ones, usable = engine.run("""
        import weakref
        size = granularity()
        tensor = Tensor(expandable_segment([size]), (size,))
        watch, before = weakref.ref(tensor), open_fds()
        memory = export_memory(tensor)
        by_memory = {memory: 1}
        del tensor
        alive = [watch() is not None]
        memory.close()
        memory.close()
        alive.append(watch() is not None)
        open_ones = [open_fds() == before]
        usable = refusal(lambda: memory.fds), memory.closed, by_memory[memory]
        segment = expandable_segment([size])
        before = open_fds()
        forgotten = export_pointer(segment, size)
        open_ones.append(open_fds() == before)
        del forgotten
        gc.collect()
        open_ones.append(open_fds() == before)
        result = alive, open_ones, usable
    """)
    assert alive == [True, False]
    assert open_ones == [True, False, True]
    assert usable == ["InvalidRequest: the device memory is closed", True, 1]


def test_exporting_leaves_nothing_in_the_driver(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("size = granularity(); base, segment = int(ok(cu.cuMemAlloc(1 << 20))), expandable_segment([size, size])")
    before = control.process(engine.pid).counters
    last = engine.run("""
        for address, size_bytes in ((base, 4096), (segment, 2 * size)):
            with export_pointer(address, size_bytes):
                pass
        # Retained and released as often: the context that the process made is the last one.
        ok(cu.cuDevicePrimaryCtxRelease(0)); result = error(cu.cuDevicePrimaryCtxRelease(0))
    """)
    after = control.process(engine.pid).counters
    assert last == "INVALID_CONTEXT"
    assert (after - before).held == {"contexts_now": -1}
    assert (after - before).context_synchronizes == (after - before).implicit_synchronizes == (after - before).host_copies == 0


def test_the_range_of_a_torch_tensor_ends_with_its_last_element() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros((4, 6, 8), dtype=torch.bfloat16)
    for view in (whole, whole[1], whole[:, 2:4], whole[::2, 1::3, 3:5], whole.permute(2, 0, 1), whole[:1].expand(3, 6, 8), whole[0, 0, 0]):
        last = view[(-1,) * view.dim()] if view.dim() else view
        # A real tensor, said to be on a GPU.
        there = SimpleNamespace(**{name: getattr(view, name) for name in ("data_ptr", "element_size", "stride", "shape")}, device=torch.device("cuda", 1))
        assert _tensor_range(there) == (view.data_ptr(), last.data_ptr() + 2 - view.data_ptr(), 1)
    with pytest.raises(InvalidRequest, match="the tensor is on device 'cpu'; 'cuda' is needed"):
        export_memory(whole)
