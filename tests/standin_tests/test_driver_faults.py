"""Each fault and limit of the stand-in driver is seen by the process that it is meant for, and what a process holds is counted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ..standin.block import ComputeMode
from ..standin.controls import Control, wait_until
from .child import Child

OUT_OF_MEMORY, MAP_FAILED, ILLEGAL_ADDRESS = 2, 205, 700


def test_the_nth_call_fails_and_only_that(child: Child, control: Control) -> None:
    with control.fail("cuMemAlloc", OUT_OF_MEMORY, skip=2, times=1) as fault:
        answers = child.run("result = [error(cu.cuMemAlloc(4096)) for _ in range(4)]")
        assert answers == ["CUDA_SUCCESS", "CUDA_SUCCESS", "OUT_OF_MEMORY", "CUDA_SUCCESS"]
        assert (fault.calls, fault.hits) == (4, 1)
    assert control.process(child.pid).calls["cuMemAlloc"] == 4
    assert control.process(child.pid).counters.allocations_now == 3


def test_a_fault_for_one_process_leaves_the_others_alone(make_child: Callable[..., Child], control: Control) -> None:
    engine, mover = make_child(), make_child()
    engine.run("device_context()")
    mover.run("device_context()")
    control.fail("cuMemAlloc", OUT_OF_MEMORY, pid=mover.pid)
    assert [child.run("result = error(cu.cuMemAlloc(4096))") for child in (engine, mover)] == ["CUDA_SUCCESS", "OUT_OF_MEMORY"]


def test_a_call_hangs_until_it_is_released(child: Child, control: Control) -> None:
    fault = control.hang("cuMemGetInfo", code=999)
    child.start("result = error(cu.cuMemGetInfo())")
    wait_until(lambda: fault.waiting_now == 1, "the call to hang")
    fault.clear()
    assert child.finish() == "UNKNOWN"
    assert fault.waiting_now == 0


def test_an_error_of_queued_work_stays_in_the_context(child: Child, control: Control) -> None:
    child.run("p = int(ok(cu.cuMemAlloc(4096))); stream = ok(cu.cuStreamCreate(1))")
    control.fail("copy", ILLEGAL_ADDRESS, times=1)
    answers = child.run("""
        queued = error(cu.cuMemcpyDtoDAsync(p, p + 2048, 100, stream))
        result = [queued, error(cu.cuStreamSynchronize(stream)), error(cu.cuMemAlloc(4096)), error(cu.cuStreamSynchronize(stream))]
    """)
    assert answers == ["CUDA_SUCCESS"] + ["ILLEGAL_ADDRESS"] * 3
    assert control.process(child.pid).counters.device_to_device_copies == 0


def test_memory_runs_out_where_the_control_says(child: Child, control: Control) -> None:
    control.limit_device_memory(1 << 20)
    answers = child.run("""
        pointer = int(ok(cu.cuMemAlloc(1 << 19)))
        full = error(cu.cuMemAlloc((1 << 19) + 1))
        free, total = ok(cu.cuMemGetInfo())
        ok(cu.cuMemFree(pointer))
        result = full, free, total, error(cu.cuMemAlloc(1 << 20))
    """)
    assert answers == ["OUT_OF_MEMORY", 1 << 19, 1 << 20, "CUDA_SUCCESS"]


def test_host_registration_ends_at_its_limit(child: Child, control: Control) -> None:
    control.limit_host_registration(3 << 20)
    answers = child.run("""
        import mmap
        memory = mmap.mmap(-1, 4 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        result = [error(cu.cuMemHostRegister(address + (i << 20), 1 << 20, 0)) for i in range(4)]
    """)
    assert answers == ["CUDA_SUCCESS"] * 3 + ["OUT_OF_MEMORY"]
    assert control.process(child.pid).counters.host_registered_bytes_now == 3 << 20


def test_registration_of_memory_that_is_not_mapped_is_refused(child: Child) -> None:
    assert child.run("result = error(cu.cuMemHostRegister(4096, 1 << 20, 0))") == "INVALID_VALUE"


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync(a, b + 1, 4096, s)", "cuMemcpyDtoDAsync(a + 1, b, 4096, s)", "cuMemsetD8Async(a, 0, 4097, s)"])
def test_a_copy_over_the_end_of_an_allocation_is_refused(child: Child, call: str) -> None:
    child.run("a, b, s = int(ok(cu.cuMemAlloc(4096))), int(ok(cu.cuMemAlloc(4096))), ok(cu.cuStreamCreate(1))")
    assert child.run(f"result = error(cu.{call})") == "INVALID_VALUE"


def test_chunks_without_access_can_not_be_copied(child: Child) -> None:
    answers = child.run("""
        properties = cu.CUmemAllocationProp()
        properties.type, properties.location.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        chunk = ok(cu.cuMemCreate(2 << 20, properties, 0))
        base = int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)))
        ok(cu.cuMemMap(base, 2 << 20, 0, chunk, 0))
        result = error(cu.cuMemsetD8(base, 1, 100))
    """)
    assert answers == "INVALID_VALUE"


def test_visible_devices_are_renumbered_and_keep_their_uuids(make_child: Callable[..., Child], control: Control) -> None:
    uuids = "ok(cu.cuInit(0)); result = [bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in range(ok(cu.cuDeviceGetCount()))]"
    both = make_child().run(uuids)
    assert len(both) == 2
    assert make_child(CUDA_VISIBLE_DEVICES="1,0").run(uuids) == both[::-1]
    text = both[1]
    name = f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
    assert make_child(CUDA_VISIBLE_DEVICES=name).run(uuids) == both[1:]
    assert make_child(CUDA_VISIBLE_DEVICES="").run("result = error(cu.cuInit(0))") == "NO_DEVICE"


def test_memory_of_a_device_that_is_not_visible_can_not_be_opened(make_child: Callable[..., Child]) -> None:
    engine, mover = make_child(CUDA_VISIBLE_DEVICES="0"), make_child(CUDA_VISIBLE_DEVICES="1")
    engine.run("device_context()")
    mover.run("device_context()")
    handle = engine.run("result = memory_handle(ok(cu.cuMemAlloc(1 << 20)))")
    assert mover.run(f'result = error(open_memory("{handle}"))') == "INVALID_DEVICE"


def test_an_exclusive_device_takes_one_process(tmp_path: Path, make_child: Callable[..., Child]) -> None:
    control = Control.create(tmp_path / "exclusive", compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
    engine, mover = (make_child(CUDA_STANDIN_CONTROL=str(control.path)) for _ in range(2))
    engine.run("device_context(0)")
    retain = "ok(cu.cuInit(0)); result = error(cu.cuDevicePrimaryCtxRetain({}))"
    assert [mover.run(retain.format(ordinal)) for ordinal in (0, 1)] == ["DEVICE_UNAVAILABLE", "CUDA_SUCCESS"]
    engine.kill()
    assert mover.run(retain.format(0)) == "CUDA_SUCCESS"


def test_opening_a_handle_can_fail_as_it_does_in_a_container(make_child: Callable[..., Child], control: Control) -> None:
    engine, mover = make_child(), make_child()
    engine.run("device_context()")
    mover.run("device_context()")
    control.fail("cuIpcOpenEventHandle", MAP_FAILED, pid=mover.pid)
    handle = engine.run("result = event_handle(ok(cu.cuEventCreate(6)))")
    assert mover.run(f'result = error(open_event("{handle}"))') == "MAP_FAILED"


def test_an_open_mapping_outlives_its_exporter_and_is_still_counted(make_child: Callable[..., Child], control: Control) -> None:
    engine, mover = make_child(), make_child()
    handle = engine.run("device_context(); pointer = ok(cu.cuMemAlloc(4096)); write(pointer, b'kept'); result = memory_handle(pointer)")
    mover.run(f'device_context(); opened = ok(open_memory("{handle}"))')
    engine.kill()
    assert mover.run("result = read(opened, 4).decode()") == "kept"
    assert control.process(mover.pid).counters.memory_handles_open_now == 1
    assert mover.run("result = error(cu.cuIpcCloseMemHandle(opened))") == "CUDA_SUCCESS"
    assert control.process(mover.pid).counters.memory_handles_open_now == 0


def test_a_process_that_gives_all_back_holds_nothing(make_child: Callable[..., Child], control: Control) -> None:
    engine, mover = make_child(), make_child()
    memory, event = engine.run("""
        device_context()
        result = memory_handle(ok(cu.cuMemAlloc(1 << 20))), event_handle(ok(cu.cuEventCreate(6)))
    """)
    mover.run(f"""
        import mmap
        device_context(1)
        opened, event = ok(open_memory("{memory}")), ok(open_event("{event}"))
        pointer, stream, own_event = ok(cu.cuMemAlloc(4096)), ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
        host = ok(cu.cuMemHostAlloc(4096, 0))
        arena = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        ok(cu.cuMemHostRegister(address, 1 << 20, 0))
        properties = cu.CUmemAllocationProp()
        properties.type, properties.location.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        chunk, base = ok(cu.cuMemCreate(2 << 20, properties, 0)), ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0))
        ok(cu.cuMemMap(base, 2 << 20, 0, chunk, 0))
    """)
    process = control.process(mover.pid)
    held = process.counters.held
    assert held == {
        "contexts_now": 1,
        "streams_now": 1,
        "events_now": 1,
        "event_handles_open_now": 1,
        "allocations_now": 1,
        "allocated_bytes_now": 4096 + (2 << 20),
        "memory_handles_open_now": 1,
        "allocation_handles_now": 1,
        "reservations_now": 1,
        "mappings_now": 1,
        "host_allocations_now": 1,
        "host_registrations_now": 1,
        "host_registered_bytes_now": 1 << 20,
    }
    mover.run("""
        ok(cu.cuIpcCloseMemHandle(opened)); ok(cu.cuEventDestroy(event)); ok(cu.cuMemFree(pointer)); ok(cu.cuStreamDestroy(stream))
        ok(cu.cuEventDestroy(own_event))
        ok(cu.cuMemFreeHost(host)); ok(cu.cuMemHostUnregister(address)); ok(cu.cuMemUnmap(base, 2 << 20)); ok(cu.cuMemRelease(chunk))
        ok(cu.cuMemAddressFree(base, 2 << 20)); ok(cu.cuDevicePrimaryCtxRelease(1))
    """)
    assert process.counters.held == {}
    left = mover.run("""
        descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        result = [name for name in [*descriptors, *open("/proc/self/maps")] if "memfd:standin" in name]
    """)
    assert left == []


def test_a_process_that_never_calls_the_driver_takes_no_record(make_child: Callable[..., Child], control: Control) -> None:
    child = make_child()
    assert list(control) == []
    with pytest.raises(KeyError, match=str(child.pid)):
        control.process(child.pid)
