"""Stream work is done after the call that queued it, in the order that was asked for and no other: so a missing wait is seen."""

from collections.abc import Callable

from ..standin.controls import Control, wait_until
from .child import Child

STREAMS = """
    a, b = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    source, target = int(ok(cu.cuMemAlloc(4096))), int(ok(cu.cuMemAlloc(4096)))
    ok(cu.cuMemsetD8(source, 1, 4096)); ok(cu.cuMemsetD8(target, 0, 4096)); ok(cu.cuCtxSynchronize())
    address, view = page_locked(4096)
"""


def test_an_event_is_done_no_earlier_than_the_work_before_it(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    process.hold()
    held = child.run("""
        event = ok(cu.cuEventCreate(2))
        ok(cu.cuMemcpyDtoHAsync(address, source, 4096, a))
        ok(cu.cuEventRecord(event, a))
        result = error(cu.cuEventQuery(event)), error(cu.cuStreamQuery(a)), view[0]
    """)
    assert held == ["NOT_READY", "NOT_READY", 0]
    process.permit(1)  # the copy
    wait_until(lambda: child.run("result = view[0]") == 1, "the copy")
    assert child.run("result = error(cu.cuEventQuery(event)), error(cu.cuStreamQuery(a))") == ["NOT_READY", "NOT_READY"]
    process.permit(1)  # the event
    child.run("ok(cu.cuEventSynchronize(event))")
    assert child.run("result = error(cu.cuEventQuery(event))") == "CUDA_SUCCESS"


def test_processes_that_start_later_are_held_too(make_child: Callable[..., Child], control: Control) -> None:
    control.hold()
    child = make_child()
    begin = "device_context(); p, s = ok(cu.cuMemAlloc(4)), ok(cu.cuStreamCreate(1)); ok(cu.cuMemsetD8Async(p, 1, 4, s)); result = error(cu.cuStreamQuery(s))"
    assert child.run(begin) == "NOT_READY"
    assert control.process(child.pid).counters.work_done == 0
    control.release()
    assert child.run("ok(cu.cuStreamSynchronize(s)); result = read(p, 4).hex()") == "01010101"


def test_a_synchronize_waits_for_held_work(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    process.hold()
    queued = process.counters.work_queued
    child.start("ok(cu.cuMemcpyDtoHAsync(address, source, 4096, a)); before = view[0]; ok(cu.cuStreamSynchronize(a)); result = before, view[0]")
    wait_until(lambda: process.counters.work_queued == queued + 1, "the copy to be queued")
    assert process.counters.work_done == queued
    process.release()
    assert child.finish() == [0, 1]


def test_a_copy_that_does_not_wait_for_the_other_stream_copies_old_bytes(child: Child) -> None:
    child.run(STREAMS)
    seen = child.run("""
        gate = int(ok(cu.cuMemAlloc(4))); ok(cu.cuMemsetD8(gate, 0, 4)); ok(cu.cuCtxSynchronize())
        def gathered(waits):
            ok(cu.cuMemsetD8Async(gate, 0, 4, b)); ok(cu.cuMemsetD8Async(target, 0, 4096, b)); ok(cu.cuStreamSynchronize(b))
            event = ok(cu.cuEventCreate(2))
            ok(cu.cuStreamWaitValue32(a, gate, 1, 0))
            ok(cu.cuMemcpyDtoDAsync(target, source, 4096, a))
            ok(cu.cuEventRecord(event, a))
            if waits:
                ok(cu.cuStreamWaitEvent(b, event, 0))
                ok(cu.cuMemcpyDtoHAsync(address, target, 4096, b))
                ok(cu.cuStreamWriteValue32(third, gate, 1, 0))
                ok(cu.cuStreamSynchronize(b))
            else:
                ok(cu.cuMemcpyDtoHAsync(address, target, 4096, b))
                ok(cu.cuStreamSynchronize(b))
                ok(cu.cuStreamWriteValue32(third, gate, 1, 0))
            ok(cu.cuStreamSynchronize(a))
            return view[0]
        third = ok(cu.cuStreamCreate(1))
        result = gathered(waits=False), gathered(waits=True)
    """)
    assert seen == [0, 1]


def test_a_wait_is_for_the_record_that_was_the_latest_when_it_was_queued(child: Child) -> None:
    child.run(STREAMS)
    answers = child.run("""
        gate = int(ok(cu.cuMemAlloc(4))); ok(cu.cuMemsetD8(gate, 0, 4)); ok(cu.cuCtxSynchronize())
        event = ok(cu.cuEventCreate(2))
        slow = ok(cu.cuStreamCreate(1))
        ok(cu.cuStreamWaitValue32(slow, gate, 1, 0))
        ok(cu.cuEventRecord(event, slow))
        ok(cu.cuStreamWaitEvent(b, event, 0))
        ok(cu.cuEventRecord(event, a))  # a later record, that is done soon
        # A stream that was wrongly let go on has had its turn after as many turns of another one.
        for _ in range(200):
            ok(cu.cuMemsetD8Async(target, 0, 1, a)); ok(cu.cuStreamSynchronize(a))
        before = error(cu.cuEventQuery(event)), error(cu.cuStreamQuery(b))
        ok(cu.cuStreamWriteValue32(a, gate, 1, 0))
        ok(cu.cuStreamSynchronize(b))
        result = before
    """)
    assert answers == ["CUDA_SUCCESS", "NOT_READY"]


def test_page_locked_sources_are_read_when_the_stream_comes_to_them_and_pageable_ones_at_once(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    process.hold()
    child.run("""
        pageable = ctypes.create_string_buffer(b"p" * 16, 16)
        view[:16] = b"l" * 16
        ok(cu.cuMemcpyHtoDAsync(target, ctypes.addressof(pageable), 16, a))
        ok(cu.cuMemcpyHtoDAsync(target + 16, address, 16, a))
        ctypes.memset(pageable, ord("x"), 16)
        view[:16] = b"x" * 16
    """)
    process.release()
    assert child.run("ok(cu.cuStreamSynchronize(a)); result = read(target, 32).decode()") == "p" * 16 + "x" * 16


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(child: Child, control: Control) -> None:
    child.run("""
        blocking, free = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(1))
        gate, data = int(ok(cu.cuMemAlloc(8))), int(ok(cu.cuMemAlloc(8)))
        ok(cu.cuMemsetD8(gate, 0, 8)); ok(cu.cuMemsetD8(data, 0, 8)); ok(cu.cuCtxSynchronize())
        ok(cu.cuStreamWaitValue32(blocking, gate, 1, 0))
        ok(cu.cuMemsetD8(data, 5, 4))           # the default stream: behind the blocking one
        other = ok(cu.cuStreamCreate(0))
        ok(cu.cuMemsetD8Async(data, 6, 4, other))  # behind the default stream
        ok(cu.cuMemsetD8Async(data + 4, 9, 4, free)); ok(cu.cuStreamSynchronize(free))  # behind nothing
    """)
    assert child.run("result = [error(cu.cuStreamQuery(s)) for s in (cu.CUstream(0), other, free)]") == ["NOT_READY", "NOT_READY", "CUDA_SUCCESS"]
    assert child.run("ok(cu.cuStreamWriteValue32(free, gate, 1, 0)); ok(cu.cuStreamSynchronize(other)); result = list(read(data, 8))") == [6] * 4 + [9] * 4


def test_a_batch_that_does_not_ask_for_stream_order_may_read_its_source_early(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    process.hold()
    child.run("""
        def batch(order, to):
            attributes = cu.CUmemcpyAttributes()
            attributes.srcAccessOrder = order
            ok(cu.cuMemcpyBatchAsync([cu.CUdeviceptr(to)], [cu.CUdeviceptr(source)], [16], 1, [attributes], [0], 1, a))
        ok(cu.cuMemsetD8Async(source, 2, 4096, a))
        batch(cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, target)
        batch(cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY, target + 16)
    """)
    process.release()
    assert child.run("ok(cu.cuStreamSynchronize(a)); result = list(read(target, 32))") == [2] * 16 + [1] * 16


def test_the_copies_of_a_batch_have_no_order_among_themselves(child: Child) -> None:
    child.run(STREAMS)
    copied = child.run("""
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        through = [cu.CUdeviceptr(target), cu.CUdeviceptr(target + 16)]
        ok(cu.cuMemcpyBatchAsync(through, [cu.CUdeviceptr(source), through[0]], [16, 16], 2, [attributes], [0], 1, a))
        ok(cu.cuStreamSynchronize(a))
        result = list(read(target, 32))
    """)
    assert copied == [1] * 16 + [0] * 16


def test_freeing_waits_for_all_work_and_says_so(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    before = process.counters
    process.hold()
    child.start("ok(cu.cuMemsetD8Async(target, 3, 4096, a)); ok(cu.cuMemFree(target))")
    wait_until(lambda: process.counters.implicit_synchronizes == before.implicit_synchronizes + 1, "the free")
    assert process.counters.allocations_now == before.allocations_now
    process.release()
    child.finish()
    assert process.counters.allocations_now == before.allocations_now - 1


def test_freeing_waits_for_the_work_of_streams_that_were_destroyed(child: Child, control: Control) -> None:
    child.run(STREAMS)
    process = control.process(child.pid)
    before = process.counters
    process.hold()
    child.start("ok(cu.cuMemsetD8Async(target, 3, 4096, a)); ok(cu.cuStreamDestroy(a)); ok(cu.cuMemFree(target)); result = error(cu.cuStreamQuery(a))")
    wait_until(lambda: process.counters.implicit_synchronizes == before.implicit_synchronizes + 1, "the free")
    assert process.counters.allocations_now == before.allocations_now
    process.release()
    assert child.finish() == "INVALID_HANDLE"
    assert process.counters.allocations_now == before.allocations_now - 1
    assert process.counters.streams_now == before.streams_now - 1


def test_a_word_is_written_when_the_stream_comes_to_it(child: Child) -> None:
    child.run(STREAMS)
    seen = child.run("""
        gate, word = int(ok(cu.cuMemAlloc(4))), int(ok(cu.cuMemAlloc(64)))
        ok(cu.cuMemsetD8(gate, 0, 4)); ok(cu.cuMemsetD8(word, 0, 64)); ok(cu.cuCtxSynchronize())
        def look():
            ok(cu.cuMemcpyDtoHAsync(address, word + 8, 8, b)); ok(cu.cuStreamSynchronize(b))
            return int.from_bytes(view[:8], "little")
        ok(cu.cuStreamWaitValue32(a, gate, 1, 0))
        ok(cu.cuMemsetD8Async(target, 7, 4096, a))
        ok(cu.cuStreamWriteValue64(a, word + 8, (1 << 40) + 5, 0))
        before = look()
        ok(cu.cuStreamWriteValue32(b, gate, 1, 0)); ok(cu.cuStreamSynchronize(a))
        result = before, look(), [error(cu.cuStreamWriteValue64(a, at, 1, 0)) for at in (word + 4, word + 64)]
    """)
    assert seen == [0, (1 << 40) + 5, ["INVALID_VALUE"] * 2]


def test_devices_without_stream_memory_operations_say_so_and_refuse_them(child: Child, control: Control) -> None:
    child.run(STREAMS)
    ask = "result = [ok(cu.cuDeviceGetAttribute(one, device)) for one in cu.CUdevice_attribute if 'STREAM_MEM_OPS' in one.name]"
    assert set(child.run(ask)) == {1}
    control.forbid_stream_memory_operations()
    assert set(child.run(ask)) == {0}
    assert child.run("result = [error(cu.cuStreamWriteValue64(a, source, 1, 0)), error(cu.cuStreamWaitValue64(a, source, 1, 0))]") == ["NOT_SUPPORTED"] * 2


def test_host_code_that_touches_device_memory_dies(child: Child) -> None:
    child.start("ctypes.string_at(int(ok(cu.cuMemAlloc(4096))), 1)")
    try:
        child.finish()
    except RuntimeError as error:
        assert "ended with -11" in str(error)
    else:
        raise AssertionError("the host read device memory")


def test_the_mover_does_not_run_ahead_of_an_engine_whose_work_is_held(make_child: Callable[..., Child], control: Control) -> None:
    engine, mover = make_child(), make_child()
    engine.run("device_context()")
    mover.run("device_context()")
    memory, event = engine.run("""
        pointer = int(ok(cu.cuMemAlloc(4096)))
        ok(cu.cuMemsetD8(pointer, 0, 4096)); ok(cu.cuCtxSynchronize())
        event, stream = ok(cu.cuEventCreate(6)), ok(cu.cuStreamCreate(1))
        result = memory_handle(pointer), event_handle(event)
    """)
    mover.run(f"""
        opened, ready, stream = int(ok(open_memory("{memory}"))), ok(open_event("{event}")), ok(cu.cuStreamCreate(1))
        address, view = page_locked(4096)
    """)
    control.process(engine.pid).hold()
    engine.run("ok(cu.cuMemsetD8Async(pointer, 42, 4096, stream)); ok(cu.cuEventRecord(event, stream))")
    # Without the wait the mover reads what was there before; with it, it stands until the engine goes on.
    seen = mover.run("""
        ok(cu.cuMemcpyDtoHAsync(address, opened, 1, stream)); ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuStreamWaitEvent(stream, ready, 0)); ok(cu.cuMemcpyDtoHAsync(address + 1, opened, 1, stream))
        result = view[0], error(cu.cuStreamQuery(stream))
    """)
    assert seen == [0, "NOT_READY"]
    control.process(engine.pid).release()
    assert mover.run("ok(cu.cuStreamSynchronize(stream)); result = list(view[:2])") == [0, 42]
    assert control.process(mover.pid).counters.memory_handles_open_now == 1
    assert control.process(mover.pid).counters.event_handles_open_now == 1
