"""The real KvikIO over the stand-ins: the way the bytes go, the faults of cuFile as KvikIO shows them, and the proof of the way."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ..standin.block import CufileMode
from ..standin.controls import Control, wait_until
from .child import Child
from .conftest import needs

SLOT = 1 << 20

KVIKIO = """
import kvikio, kvikio.defaults
# Below its threshold KvikIO bounces on its own; with AUTO it falls back without a word.
kvikio.defaults.set({"compat_mode": kvikio.CompatMode.OFF, "gds_threshold": 0, "task_size": 16 << 20, "num_threads": 2})

class Slot:
    # Device memory as KvikIO takes it.
    def __init__(self, byte_count, pointer=None):
        self.pointer = int(ok(cu.cuMemAlloc(byte_count))) if pointer is None else pointer
        self.byte_count = byte_count

    @property
    def __cuda_array_interface__(self):
        return {"shape": (self.byte_count,), "typestr": "|u1", "data": (self.pointer, False), "version": 3, "strides": None}

    def part(self, offset, byte_count):
        return Slot(byte_count, self.pointer + offset)

def failure(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

device_context()
slot = Slot(SLOT_BYTES)
"""


@pytest.fixture
def make_kvikio(make_child: Callable[..., Child], volume: Path) -> Callable[..., Child]:
    needs("kvikio")

    def make(**variables: str) -> Child:
        child = make_child(**variables)
        child.run(f"SLOT_BYTES, PATH = {SLOT}, {str(volume)!r}")
        child.run(KVIKIO)
        return child

    return make


@pytest.fixture
def mover(make_kvikio: Callable[..., Child]) -> Child:
    """A process with KvikIO set to GDS, one registered slot, and the volume open."""
    child = make_kvikio()
    child.run("kvikio.memory_register(slot); file = kvikio.CuFile(PATH, 'r+')")
    return child


def digest_of(path: Path, offset: int, byte_count: int) -> str:
    return hashlib.sha256(path.read_bytes()[offset : offset + byte_count]).hexdigest()


DIGEST = "import hashlib; result = hashlib.sha256(read(slot.pointer, SLOT_BYTES)).hexdigest()"


def test_gds_makes_one_cufile_call_a_slice_and_no_copy_through_the_host(mover: Child, control: Control, volume: Path) -> None:
    process = control.process(mover.pid)
    before = process.counters
    assert mover.run("result = [file.pread(slot, SLOT_BYTES, i * SLOT_BYTES).get() for i in range(5)]") == [SLOT] * 5
    assert mover.run("result = file.pwrite(slot, SLOT_BYTES, 7 * SLOT_BYTES).get()") == SLOT
    moved = process.counters - before
    assert (moved.cufile_reads, moved.cufile_writes, moved.cufile_registered) == (5, 1, 6)
    assert (moved.cufile_read_bytes, moved.cufile_write_bytes) == (5 * SLOT, SLOT)
    assert (moved.host_copies, moved.cufile_bounced, moved.cufile_unaligned, moved.cufile_host_buffers) == (0, 0, 0, 0)
    assert mover.run(DIGEST) == digest_of(volume, 4 * SLOT, SLOT) == digest_of(volume, 7 * SLOT, SLOT)


def test_compat_mode_of_kvikio_bounces_and_calls_no_cufile(make_kvikio: Callable[..., Child], control: Control, volume: Path) -> None:
    child = make_kvikio()
    child.run("kvikio.defaults.set('compat_mode', kvikio.CompatMode.ON); file = kvikio.CuFile(PATH, 'r+')")
    before = control.process(child.pid).counters
    assert child.run("result = file.pread(slot, SLOT_BYTES, SLOT_BYTES).get() + file.pwrite(slot, SLOT_BYTES, 0).get()") == 2 * SLOT
    moved = control.process(child.pid).counters - before
    assert moved.cufile_reads == moved.cufile_writes == 0
    assert (moved.host_to_device_bytes, moved.device_to_host_bytes) == (SLOT, SLOT)
    assert child.run(DIGEST) == digest_of(volume, SLOT, SLOT) == digest_of(volume, 0, SLOT)


def test_a_part_of_a_slot_is_found_as_registered_and_an_unregistered_slot_is_bounced(mover: Child, control: Control) -> None:
    process = control.process(mover.pid)
    before = process.counters
    mover.run("result = file.pread(slot.part(65536, 65536), 65536, 0).get()")
    assert (process.counters - before).cufile_registered == 1
    # KvikIO's raw calls hand on the pointer that they were given; cuFile knows base pointers only.
    before = process.counters
    mover.run("file.raw_read(slot.part(65536, 65536), 65536, 0); other = Slot(SLOT_BYTES); file.pread(other, SLOT_BYTES, 0).get()")
    moved = process.counters - before
    assert (moved.cufile_registered, moved.cufile_bounced) == (0, 2)


@pytest.mark.parametrize("offset", [0, 333, (8 << 20) - 5])
def test_transfers_that_are_not_aligned_keep_the_bytes_around_them(mover: Child, control: Control, volume: Path, offset: int) -> None:
    before, old = control.process(mover.pid).counters, volume.read_bytes()
    assert mover.run("write(slot.pointer, bytes(range(256)) * 512); result = None") is None
    assert mover.run(f"result = file.pwrite(slot.part(100, 70001), 70001, {offset}).get()") == 70001
    assert mover.run(f"ok(cu.cuMemsetD8(slot.pointer, 0, SLOT_BYTES)); result = file.pread(slot.part(4096, 70001), 70001, {offset}).get()") == 70001
    wanted = (bytes(range(256)) * 512)[100:70101]
    assert volume.read_bytes() == old[:offset] + wanted + old[offset + 70001 :]
    assert bytes.fromhex(mover.run("result = read(slot.pointer + 4096, 70001).hex()")) == wanted
    assert (control.process(mover.pid).counters - before).cufile_unaligned >= 2


def test_a_read_at_the_end_of_the_file_is_short(mover: Child) -> None:
    assert mover.run("result = [file.pread(slot, SLOT_BYTES, (8 << 20) - 4096).get(), file.pread(slot, SLOT_BYTES, 8 << 20).get()]") == [4096, 0]


# ---- the proof of the way ----

STATS = """
from cuda.bindings import cufile
def stats():
    block = ctypes.create_string_buffer(5112)
    cufile.get_stats_l3(ctypes.addressof(block))
    word = lambda offset: int.from_bytes(block.raw[offset:offset + 8], "little")
    gpu = 1144
    return {"gpus": word(1136) & 0xffffffff, "uuid": block.raw[gpu:gpu + 16].hex(), "p2p": [word(gpu + 16 + 40), word(gpu + 16 + 144)],
            "nvfs": [word(gpu + 16 + 48), word(gpu + 16 + 152)], "posix": [word(gpu + 16 + 56), word(gpu + 16 + 160)]}
cufile.set_stats_level(3)
cufile.stats_start()
"""


@pytest.mark.parametrize("mode", CufileMode)
def test_statistics_tell_which_way_the_bytes_went(mover: Child, control: Control, mode: CufileMode) -> None:
    control.cufile_mode = mode
    mover.run(STATS)
    before = control.process(mover.pid).counters
    stats = mover.run("file.pread(slot, SLOT_BYTES, 0).get(); [file.pwrite(slot, SLOT_BYTES, 0).get() for _ in range(2)]; result = stats()")
    wanted = {way: [1, 2] if way == mode.name.lower().replace("compat", "posix") else [0, 0] for way in ("nvfs", "p2p", "posix")}
    assert {way: stats[way] for way in wanted} == wanted
    assert stats["gpus"] == 2
    assert stats["uuid"] == mover.run("result = bytes(ok(cu.cuDeviceGetUuid(device_context())).bytes).hex()")
    assert (control.process(mover.pid).counters - before).host_copies == (3 if mode is CufileMode.COMPAT else 0)


def test_statistics_need_a_level_and_stop_when_they_are_stopped(mover: Child) -> None:
    refused = mover.run("""
        from cuda.bindings import cufile
        block = ctypes.create_string_buffer(5112)
        result = [failure(cufile.stats_start), failure(lambda: cufile.get_stats_l3(ctypes.addressof(block)))]
    """)
    assert ["INTERNAL_ERROR" in refused[0], "INVALID_VALUE" in refused[1]] == [True, True], refused
    mover.run(STATS)
    assert mover.run("cufile.stats_stop(); file.pread(slot, SLOT_BYTES, 0).get(); result = stats()['nvfs']") == [0, 0]


def test_driver_properties_and_p2p_flags_follow_the_mode(make_kvikio: Callable[..., Child], control: Control) -> None:
    seen = {}
    for mode in CufileMode:
        control.cufile_mode = mode
        child = make_kvikio()
        seen[mode] = child.run("""
            import kvikio.cufile_driver
            from cuda.bindings import cufile
            cufile.driver_open()
            get_flags = ctypes.CDLL("libcufile.so.0").cuFileDriverGetP2PFlags  # cuda.bindings has no name for it
            get_flags.restype = ctypes.c_uint64  # a CUfileError_t: two ints
            def flags(target):
                out = ctypes.c_int()
                assert get_flags(target, ctypes.byref(out)) == 0
                return [name for name, bit in (("p2pdma", 1), ("nvfs", 2)) if out.value & bit]
            properties = kvikio.cufile_driver.get
            result = [properties("is_gds_available"), properties("major_version"), flags(4), flags(5)]
        """)
    assert seen == {
        CufileMode.NVFS: [True, 2, ["nvfs"], ["nvfs"]],
        CufileMode.P2P: [seen[CufileMode.P2P][0], 0, ["p2pdma"], []],
        CufileMode.COMPAT: [False, 0, [], []],
    }


# ---- faults ----


@pytest.mark.parametrize("code", [5, 28, 5044])
def test_a_failed_transfer_raises_and_the_next_one_goes_on(mover: Child, control: Control, code: int) -> None:
    control.fail("cuFileRead", code, skip=1, times=1)
    answers = mover.run("result = [failure(lambda: file.pread(slot, SLOT_BYTES, 0).get()) for _ in range(3)]")
    assert answers[0] == answers[2] == SLOT
    assert "Error" in str(answers[1])


def test_a_short_transfer_is_a_short_count(mover: Child, control: Control) -> None:
    control.short("cuFileRead", 8192, times=1)
    control.short("cuFileWrite", 4096, skip=1)
    assert mover.run("result = [file.pread(slot, SLOT_BYTES, 0).get() for _ in range(2)]") == [8192, SLOT]
    assert mover.run("result = [file.pwrite(slot, SLOT_BYTES, 0).get() for _ in range(3)]") == [SLOT, 4096, 4096]


def test_a_transfer_hangs_until_it_is_released_and_others_go_on(mover: Child, control: Control) -> None:
    fault = control.hang("cuFileWrite", times=1)
    mover.run("future = file.pwrite(slot, SLOT_BYTES, 0)")
    wait_until(lambda: fault.waiting_now == 1, "the write to hang")
    assert mover.run("result = future.done(), file.pread(slot, SLOT_BYTES, SLOT_BYTES).get()") == [False, SLOT]
    fault.clear()
    assert mover.run("result = future.get()") == SLOT


def test_a_delayed_transfer_is_delayed(mover: Child, control: Control) -> None:
    with control.delay("cuFileRead", 20_000) as fault:
        took = mover.run("import time; start = time.monotonic(); file.pread(slot, SLOT_BYTES, 0).get(); result = time.monotonic() - start")
        assert fault.hits == 1
    assert took >= 0.02


def test_registration_ends_where_the_bar_does(mover: Child, control: Control) -> None:
    control.limit_bar(2 * SLOT)
    answers = mover.run("more = [Slot(SLOT_BYTES) for _ in range(2)]; result = [failure(lambda: kvikio.memory_register(one)) for one in more]")
    assert answers[0] is None
    assert "pinned GPU Memory" in answers[1]
    assert control.process(mover.pid).counters.cufile_buffer_bytes_now == 2 * SLOT


def test_a_buffer_is_registered_once_and_managed_memory_is_refused(mover: Child) -> None:
    answers = mover.run("""
        from cuda.bindings import cufile
        managed = int(ok(cu.cuMemAllocManaged(4096, 1)))
        calls = [(slot.pointer, SLOT_BYTES), (managed, 4096), (slot.pointer, SLOT_BYTES + 1)]
        result = [str(failure(lambda: cufile.buf_register(*call, 0))) for call in calls] + [str(failure(lambda: cufile.buf_deregister(slot.pointer + 4096)))]
    """)
    wanted = ["MEMORY_ALREADY_REGISTERED", "CUDA_MEMORY_TYPE_INVALID", "CUDA_POINTER_RANGE_ERROR", "MEMORY_NOT_REGISTERED"]
    assert [text in answer for text, answer in zip(wanted, answers, strict=True)] == [True] * 4, answers


def test_memory_of_another_process_can_be_registered_and_read_into(make_kvikio: Callable[..., Child], make_child: Callable[..., Child], volume: Path) -> None:
    engine, mover = make_child(), make_kvikio()
    handle = engine.run(f"device_context(); pointer = int(ok(cu.cuMemAlloc({SLOT}))); result = memory_handle(pointer)")
    mover.run(f"""
        theirs = Slot(SLOT_BYTES, int(ok(open_memory("{handle}"))))
        kvikio.memory_register(theirs)
        with kvikio.CuFile(PATH, "r") as file:
            assert file.pread(theirs, SLOT_BYTES, SLOT_BYTES).get() == SLOT_BYTES
        kvikio.memory_deregister(theirs)
        ok(cu.cuIpcCloseMemHandle(theirs.pointer))
    """)
    assert engine.run(f"import hashlib; result = hashlib.sha256(read(pointer, {SLOT})).hexdigest()") == digest_of(volume, SLOT, SLOT)


def test_memory_freed_while_it_is_registered_is_counted(mover: Child, control: Control) -> None:
    mover.run("ok(cu.cuMemFree(slot.pointer))")
    assert control.process(mover.pid).counters.freed_while_registered == 1


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [("cuFileDriverOpen", 5001, "nvidia-fs driver is not loaded"), ("cuFileHandleRegister", 5008, "not supported on current file")],
)
def test_a_driver_or_file_that_is_refused_raises_with_compat_mode_off(
    make_kvikio: Callable[..., Child], control: Control, function: str, code: int, text: str
) -> None:
    control.fail(function, code)
    assert text in make_kvikio().run("result = failure(lambda: kvikio.CuFile(PATH, 'r+'))")


def test_compat_mode_can_be_forbidden_by_the_configuration(make_kvikio: Callable[..., Child], control: Control, tmp_path: Path) -> None:
    control.cufile_mode = CufileMode.COMPAT
    configuration = tmp_path / "cufile.json"
    configuration.write_text('{"properties": {"allow_compat_mode": false}}')
    open_file = "result = str(failure(lambda: kvikio.CuFile(PATH, 'r+')))"
    assert "nvidia-fs driver is not loaded" in make_kvikio(CUFILE_ENV_PATH_JSON=str(configuration)).run(open_file)
    assert "CuFile object" in make_kvikio().run(open_file)


# ---- the other forms ----


def test_stream_reads_come_after_the_work_before_them(make_kvikio: Callable[..., Child], control: Control, volume: Path, tmp_path: Path) -> None:
    configuration = tmp_path / "cufile.json"  # without one KvikIO synchronises the stream and reads on its own
    configuration.write_text("{}")
    mover = make_kvikio(CUFILE_ENV_PATH_JSON=str(configuration))
    mover.run("stream, file = ok(cu.cuStreamCreate(1)), kvikio.CuFile(PATH, 'r+')")
    control.process(mover.pid).hold()
    mover.run("ok(cu.cuMemsetD8Async(slot.pointer, 0, SLOT_BYTES, stream)); future = file.raw_read_async(slot, int(stream), SLOT_BYTES, SLOT_BYTES)")
    assert control.process(mover.pid).counters.cufile_reads == 0
    control.process(mover.pid).release()
    assert mover.run("result = future.check_bytes_done()") == SLOT
    assert mover.run(DIGEST) == digest_of(volume, SLOT, SLOT)


def test_a_batch_tells_the_result_of_each_entry(mover: Child, control: Control) -> None:
    control.fail("cuFileBatchIO read", 5, skip=1, times=1)
    answers = mover.run("""
        library = ctypes.CDLL("libcufile.so.0")
        class Descriptor(ctypes.Structure):
            _fields_ = (("type", ctypes.c_int), ("fd", ctypes.c_void_p), ("operations", ctypes.c_void_p))
        class Entry(ctypes.Structure):
            _fields_ = (("mode", ctypes.c_int), ("base", ctypes.c_void_p), ("file_offset", ctypes.c_int64), ("offset", ctypes.c_int64),
                        ("size", ctypes.c_size_t), ("file", ctypes.c_void_p), ("opcode", ctypes.c_int), ("cookie", ctypes.c_void_p))
        class Event(ctypes.Structure):
            _fields_ = (("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("result", ctypes.c_ssize_t))
        for name in ("HandleRegister", "BatchIOSetUp", "BatchIOSubmit", "BatchIOGetStatus"):
            getattr(library, "cuFile" + name).restype = ctypes.c_uint64
        handle, batch, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint(8)
        assert library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, os.open(PATH, os.O_RDWR), None))) == 0
        assert library.cuFileBatchIOSetUp(ctypes.byref(batch), 3) == 0
        entries = (Entry * 3)(*(Entry(1, slot.pointer, i * 8192, i * 8192, 8192, handle, 0, 100 + i) for i in range(3)))
        too_many = library.cuFileBatchIOSubmit(batch, 4, entries, 0) & 0xffffffff
        assert library.cuFileBatchIOSubmit(batch, 3, entries, 0) == 0
        events = (Event * 8)()
        assert library.cuFileBatchIOGetStatus(batch, 3, ctypes.byref(count), events, None) == 0
        result = too_many, [(event.cookie, event.status, event.result) for event in events[:count.value]]
    """)
    assert answers == [5037, [[100, 0x10, 8192], [101, 0x40, -1], [102, 0x10, 8192]]]


def test_all_that_was_opened_is_given_back(mover: Child, control: Control) -> None:
    process = control.process(mover.pid)
    held = process.counters.held
    assert (held["cufile_handles_now"], held["cufile_buffers_now"], held["cufile_buffer_bytes_now"]) == (1, 1, SLOT)
    mover.run("file.pread(slot, SLOT_BYTES, 0).get(); file.close(); kvikio.memory_deregister(slot); ok(cu.cuMemFree(slot.pointer))")
    assert not [name for name in process.counters.held if name.startswith(("cufile", "alloc"))]
    assert process.counters.freed_while_registered == 0


def test_a_child_loads_the_stand_ins_and_no_other_library_of_cuda(make_kvikio: Callable[..., Child]) -> None:
    loaded = make_kvikio().run("result = sorted({line.split()[-1] for line in open('/proc/self/maps') if '/libcu' in line})")
    assert [Path(library).name for library in loaded] == ["libcuda.so.1", "libcufile.so.0"]
    assert all("/standin-" in library for library in loaded)
