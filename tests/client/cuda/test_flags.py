"""Flags that the client makes, and their order across processes."""

from collections.abc import Callable
from typing import Any

import pytest

from ...standin.controls import Control
from ...standin_tests.child import Child

FACTS = """
def facts(value):
    return dict(handle=value.handle.hex(), offset=value.offset_bytes, value=value.value)
"""


def word(mover: Child, facts: dict[str, Any]) -> int:
    """What another process reads where the flag is."""
    return int(
        mover.run(f"""
            base = int(ok(open_memory({facts["handle"]!r})))
            result = int.from_bytes(read(base + {facts["offset"]}, 8), "little")
            ok(cu.cuIpcCloseMemHandle(base))
        """)
    )


def test_a_flag_comes_behind_the_work_of_its_stream(engine: Child, mover: Child) -> None:
    first, second = engine.run(f"""
        {FACTS.strip().replace(chr(10), chr(10) + " " * 8)}
        gate, data = int(ok(cu.cuMemAlloc(4096))), int(ok(cu.cuMemAlloc(4096)))
        ok(cu.cuMemsetD8(gate, 0, 4096)); ok(cu.cuMemsetD8(data, 0, 4096)); ok(cu.cuCtxSynchronize())
        stream, flag = ok(cu.cuStreamCreate(1)), new_flag()
        first = flag.write(int(stream))
        ok(cu.cuStreamSynchronize(stream))
        # A gate that only this process opens, so that the work before the flag can't be done yet.
        ok(cu.cuStreamWaitValue32(stream, gate, 1, 0))
        ok(cu.cuMemsetD8Async(data, 77, 4096, stream))
        second = flag.write(int(stream))
        result = facts(first), facts(second)
    """)
    assert (second["value"], second["handle"], second["offset"]) == (first["value"] + 1, first["handle"], first["offset"])
    assert first["offset"] % 8 == 0 and len(first["handle"]) == 128
    assert word(mover, second) == first["value"]
    engine.run("other = ok(cu.cuStreamCreate(1)); ok(cu.cuStreamWriteValue32(other, gate, 1, 0)); ok(cu.cuStreamSynchronize(stream))")
    assert word(mover, second) == second["value"]
    assert engine.run("result = read(data, 1)[0]") == 77


def test_a_new_word_is_0_before_it_is_written(engine: Child, mover: Child) -> None:
    """Whatever its memory held before: a value left there could be taken for one that was reached."""
    facts = engine.run(f"""
        {FACTS.strip().replace(chr(10), chr(10) + " " * 8)}
        gate = int(ok(cu.cuMemAlloc(4096)))
        ok(cu.cuMemsetD8(gate, 0, 4096)); ok(cu.cuCtxSynchronize())
        stream = ok(cu.cuStreamCreate(1))
        ok(cu.cuStreamWaitValue32(stream, gate, 1, 0))
        result = facts(new_flag().write(int(stream)))
    """)
    assert facts["value"] == 1 and word(mover, facts) == 0
    engine.run("other = ok(cu.cuStreamCreate(1)); ok(cu.cuStreamWriteValue32(other, gate, 1, 0)); ok(cu.cuStreamSynchronize(stream))")


def test_a_word_rises_from_flag_to_flag(engine: Child) -> None:
    names = engine.run("""
        from offloadd.client.cuda.flags import WORDS
        stream, names = int(ok(cu.cuStreamCreate(1))), []
        for _ in range(2 * WORDS):
            with new_flag() as flag:
                names += [flag.write(stream), flag.write(stream)]
        result = [(name.handle.hex(), name.offset_bytes, name.value) for name in names]
    """)
    assert len({handle for handle, *_ in names}) == 1, "the daemon opens one allocation, however many flags there were"
    assert len({tuple(name) for name in names}) == len(names), "a value was used twice"
    words: dict[int, int] = {}
    for _, offset, value in names:
        assert value == words.get(offset, 0) + 1
        words[offset] = value
    assert set(words.values()) == {4}, "the word that was free for longest comes first"


def test_open_flags_share_no_word(engine: Child) -> None:
    names = engine.run("""
        from offloadd.client.cuda.flags import WORDS
        streams = [int(ok(cu.cuStreamCreate(1)))] * (WORDS + 1)
        flags = [new_flag() for _ in streams]
        names = [flag.write(stream) for flag, stream in zip(flags, streams)]
        result = [(name.handle.hex(), name.offset_bytes) for name in names]
    """)
    assert len({tuple(name) for name in names}) == len(names)


def test_a_flag_belongs_to_one_stream_and_a_closed_one_to_none(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    answers = engine.run("""
        one, other = (int(ok(cu.cuStreamCreate(1))) for _ in range(2))
        flag = new_flag(device=0)
        value = flag.write(one).value
        answers = [refusal(flag.write, other)]
        after = flag.write(one).value
        flag.close()
        flag.close()
        # Retained and released as often: the context that the process made is the last one.
        ok(cu.cuDevicePrimaryCtxRelease(0))
        result = answers + [refusal(flag.write, one), error(cu.cuDevicePrimaryCtxRelease(0)), after - value]
    """)
    assert answers[0].startswith("InvalidRequest: the flag belongs to stream 0x") and answers[0].endswith("make one for each")
    assert answers[1:] == ["InvalidRequest: the flag is closed", "INVALID_CONTEXT", 1]


def test_flags_work_from_threads_without_a_context_if_the_device_is_named(engine: Child) -> None:
    answers = engine.run("""
        import threading
        answers, flag, stream = [], new_flag(), int(ok(cu.cuStreamCreate(1)))
        def work():
            flag.write(stream)
            answers.extend([refusal(new_flag), refusal(new_flag, 99)])
            with new_flag(device=0) as other:
                other.write(stream)
            answers.append(int(ok(cu.cuCtxGetCurrent())))
        thread = threading.Thread(target=work); thread.start(); thread.join()
        result = answers
    """)
    assert answers[0] == "InvalidRequest: no CUDA context is current in this thread; name the device"
    assert answers[1].startswith("InvalidRequest: there is no device 99")
    assert answers[2] == 0


def test_a_gpu_whose_streams_can_not_write_words_is_told_with_what_to_do(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    control.forbid_stream_memory_operations()
    answer = engine.run("result = refusal(new_flag)")
    assert answer.startswith("PathUnavailable: device 0 has no 64-bit stream memory operations") and "new_event" in answer
    assert control.process(engine.pid).counters.held == {"contexts_now": 1}


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize", "cuMemGetAddressRange", "cuIpcGetMemHandle"])
def test_a_flag_that_can_not_be_made_leaves_nothing(make_standin: Callable[..., Child], control: Control, function: str) -> None:
    engine = make_standin()
    with control.fail(function, 2):
        answer = engine.run("result = refusal(new_flag, 0)")
    assert answer.startswith("PathUnavailable:") and "CUDA_ERROR_OUT_OF_MEMORY" in answer
    assert control.process(engine.pid).counters.held == {"contexts_now": 1}
    assert engine.run("ok(cu.cuDevicePrimaryCtxRelease(0)); result = error(cu.cuDevicePrimaryCtxRelease(0))") == "INVALID_CONTEXT", "a context was kept"


def test_a_write_that_the_driver_refuses_takes_no_value(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("flag, stream = new_flag(), int(ok(cu.cuStreamCreate(1))); before = flag.write(stream).value")
    with control.fail("cuStreamWriteValue64", 801):
        answer = engine.run("result = refusal(flag.write, stream)")
    assert answer.startswith("PathUnavailable: stream 0x") and "CUDA_ERROR_NOT_SUPPORTED" in answer
    assert engine.run("result = flag.write(stream).value - before") == 1


def test_writing_queues_one_piece_of_work_and_waits_for_none(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    engine.run("flag, stream = new_flag(), int(ok(cu.cuStreamCreate(1)))")
    process = control.process(engine.pid)
    # Nothing that is queued is done from here on: calls that waited for it would never return.
    process.hold()
    before = process.counters
    engine.run("flag.write(stream); flag.close(); other = new_flag()")
    done = process.counters - before
    assert (done.work_queued, done.work_done, done.context_synchronizes, done.implicit_synchronizes) == (1, 0, 0, 0)
