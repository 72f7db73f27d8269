"""Events that the client exports, and their order across processes."""

from collections.abc import Callable

from ...standin.controls import Control
from ...standin_tests.child import Child


def test_work_of_another_process_waits_for_the_engines_event(engine: Child, mover: Child) -> None:
    memory, ready = engine.run("""
        pointer = int(ok(cu.cuMemAlloc(2 << 20)))
        ok(cu.cuMemsetD8(pointer, 0, 2 << 20)); ok(cu.cuCtxSynchronize())
        stream, event = ok(cu.cuStreamCreate(1)), new_event()
        # A gate that only this process opens, so that the event can't have happened yet.
        ok(cu.cuStreamWaitValue32(stream, pointer, 1, 0))
        ok(cu.cuMemsetD8Async(pointer + 4096, 77, 4096, stream))
        event.record(int(stream))
        result = export_pointer(pointer, 2 << 20).ipc_handle.hex(), event.handle.hex()
    """)
    before = mover.run(f"""
        opened, event = int(ok(open_memory({memory!r}))), ok(open_event({ready!r}))
        stream = ok(cu.cuStreamCreate(1))
        address, view = page_locked(4096)
        ok(cu.cuStreamWaitEvent(stream, event, 0))
        ok(cu.cuMemcpyDtoHAsync(address, opened + 4096, 4096, stream))
        result = error(cu.cuStreamQuery(stream)), view[0]
    """)
    assert before == ["NOT_READY", 0]
    engine.run("gate = ok(cu.cuStreamCreate(1)); ok(cu.cuStreamWriteValue32(gate, pointer, 1, 0))")
    assert mover.run("ok(cu.cuStreamSynchronize(stream)); result = view[0]") == 77


def test_work_of_the_engine_waits_for_what_another_process_recorded(engine: Child, mover: Child) -> None:
    memory, ready = engine.run("""
        pointer, event = int(ok(cu.cuMemAlloc(2 << 20))), new_event(device=0)
        ok(cu.cuMemsetD8(pointer, 0, 2 << 20)); ok(cu.cuCtxSynchronize())
        result = export_pointer(pointer, 2 << 20).ipc_handle.hex(), event.handle.hex()
    """)
    mover.run(f"""
        opened, event = int(ok(open_memory({memory!r}))), ok(open_event({ready!r}))
        stream = ok(cu.cuStreamCreate(1))
        ok(cu.cuStreamWaitValue32(stream, opened, 1, 0))
        ok(cu.cuMemsetD8Async(opened + 4096, 78, 4096, stream))
        ok(cu.cuEventRecord(event, stream))
    """)
    before = engine.run("""
        stream = ok(cu.cuStreamCreate(1))
        address, view = page_locked(4096)
        event.wait(int(stream))
        ok(cu.cuMemcpyDtoHAsync(address, pointer + 4096, 4096, stream))
        result = error(cu.cuStreamQuery(stream)), view[0]
    """)
    assert before == ["NOT_READY", 0]
    engine.run("gate = ok(cu.cuStreamCreate(1)); ok(cu.cuStreamWriteValue32(gate, pointer, 1, 0)); ok(cu.cuStreamSynchronize(stream))")
    assert engine.run("result = view[0]") == 78


def test_events_of_torch_of_cupy_and_of_the_driver_are_exported(engine: Child, mover: Child) -> None:
    handles = engine.run("""
        raw = ok(cu.cuEventCreate(6))
        own = new_event()
        made = [export_event(one) for one in (SimpleNamespace(cuda_event=int(raw)), SimpleNamespace(ptr=int(raw)), int(raw), raw)]
        assert export_event(own) == own.handle and len(own.handle) == IPC_HANDLE_BYTES
        result = [handle.hex() for handle in (*made, own.handle)]
    """)
    assert len(set(handles[:4])) == 1 and handles[4] != handles[0]
    assert mover.run(f"result = [error(open_event(handle)) for handle in {[handles[0], handles[4]]}]") == ["CUDA_SUCCESS"] * 2


def test_events_that_were_not_made_for_other_processes_are_refused_with_what_to_do(engine: Child) -> None:
    plain, unmade, no_event = engine.run("""
        result = [refusal(export_event, one) for one in (int(ok(cu.cuEventCreate(2))), SimpleNamespace(cuda_event=0), "event")]
    """)
    assert plain.startswith("InvalidRequest:") and "torch.cuda.Event(interprocess=True, enable_timing=False)" in plain and "cupy.cuda.Event(" in plain
    assert unmade.startswith("InvalidRequest: the event's handle is 0") and "record it before" in unmade
    assert no_event.startswith("InvalidRequest: a str is no CUDA event")


def test_events_work_from_threads_without_a_context_if_the_device_is_named(engine: Child) -> None:
    answers = engine.run("""
        import threading
        answers, event, raw = [], new_event(), int(ok(cu.cuEventCreate(6)))
        def work():
            event.record(0)
            event.wait(0)
            answers.extend([refusal(new_event), refusal(export_event, raw), refusal(new_event, 99), len(export_event(raw, device=0))])
            with new_event(device=0) as other:
                other.record(0)
            answers.append(int(ok(cu.cuCtxGetCurrent())))
        thread = threading.Thread(target=work); thread.start(); thread.join()
        result = answers
    """)
    assert answers[0] == answers[1] == "InvalidRequest: no CUDA context is current in this thread; name the device"
    assert answers[2].startswith("InvalidRequest: there is no device 99")
    assert answers[3:] == [64, 0]


def test_a_closed_event_is_gone_from_the_driver_and_refuses_to_be_used(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    answers = engine.run("""
        raw, before = ok(cu.cuEventCreate(6)), open_fds()
        with new_event(device=0) as event, new_event():
            export_event(raw, device=0)
        event.close()
        unchanged = open_fds() == before
        ok(cu.cuEventDestroy(raw))
        # Retained and released as often: the context that the process made is the last one.
        ok(cu.cuDevicePrimaryCtxRelease(0))
        result = refusal(event.record, 0), refusal(event.wait, 0), error(cu.cuDevicePrimaryCtxRelease(0)), unchanged
    """)
    assert answers == ["InvalidRequest: the event is closed"] * 2 + ["INVALID_CONTEXT", True]
    assert control.process(engine.pid).counters.held == {}


def test_a_driver_that_exports_no_events_is_an_error_that_leaves_none_behind(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("raw = int(ok(cu.cuEventCreate(6)))")
    before = control.process(engine.pid).counters
    with control.fail("cuIpcGetEventHandle", 801):
        answers = engine.run("result = refusal(new_event, 0), refusal(export_event, raw)")
    with control.fail("cuEventCreate", 801):
        answers += engine.run("result = [refusal(new_event, 0)]")
    assert all(answer.startswith("PathUnavailable:") and "CUDA_ERROR_NOT_SUPPORTED" in answer for answer in answers)
    assert control.process(engine.pid).counters.held == before.held
    assert engine.run("ok(cu.cuDevicePrimaryCtxRelease(0)); result = error(cu.cuDevicePrimaryCtxRelease(0))") == "INVALID_CONTEXT", "a context was kept"


def test_recording_and_waiting_queue_one_piece_of_work_each_and_wait_for_none(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("event, stream = new_event(), int(ok(cu.cuStreamCreate(1)))")
    process = control.process(engine.pid)
    # Nothing that is queued is done from here on: calls that waited for it would never return.
    process.hold()
    before, calls = process.counters, process.calls
    engine.run("event.record(stream); event.wait(stream)")
    done = process.counters - before
    assert (done.work_queued, done.work_done, done.context_synchronizes, done.implicit_synchronizes) == (2, 0, 0, 0)
    assert process.calls["cuStreamWaitEvent"] - calls.get("cuStreamWaitEvent", 0) == 1
    assert process.calls["cuEventRecord"] - calls.get("cuEventRecord", 0) == 1
