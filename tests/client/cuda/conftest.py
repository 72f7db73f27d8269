import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...standin.build import Paths, build, compiler
from ...standin.controls import Control, environment
from ...standin_tests.child import PRELUDE, Child

# What engines hand over, as the libraries' own classes look, and what the other side does with it.
NAMES = """
import gc, socket
from types import SimpleNamespace
from offloadd.client.cuda import *
from offloadd.errors import InvalidRequest, PathUnavailable

class Tensor:
    # A torch tensor: an interior pointer of its allocator's segment.
    def __init__(self, address, shape, strides=None, item_bytes=1, device="cuda", index=0):
        self.address, self.shape, self.item_bytes = address, shape, item_bytes
        self.device = SimpleNamespace(type=device, index=index)
        self.strides = strides
    def data_ptr(self): return self.address
    def element_size(self): return self.item_bytes
    def stride(self):
        steps, step = [], 1
        for count in reversed(self.shape):
            steps.insert(0, step)
            step *= count
        return self.strides or tuple(steps)

def array(address, shape, typestr="|u1", strides=None, read_only=False):
    # What CuPy, Numba and Warp arrays have.
    return SimpleNamespace(__cuda_array_interface__=dict(version=3, data=(address, read_only), shape=shape, typestr=typestr, strides=strides, stream=1))

def refusal(call, *values, **named):
    try:
        return f"no error: {call(*values, **named)}"
    except (InvalidRequest, PathUnavailable) as error:
        return f"{type(error).__name__}: {error}"

def open_fds():
    return sorted(os.listdir("/proc/self/fd"))

def facts(memory):
    return dict(
        uuid=memory.device_uuid, bytes=memory.memory_bytes, offset=memory.offset_bytes, allocation=memory.allocation_bytes,
        handle=memory.ipc_handle.hex(), chunks=[chunk.chunk_bytes for chunk in memory.chunks],
    )

POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

def properties(handle_type, ordinal=0):
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    made.requestedHandleTypes = handle_type
    return made

def granularity():
    return ok(cu.cuMemGetAllocationGranularity(properties(POSIX), cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))

def map_chunks(chunks, sizes):
    base = at = int(ok(cu.cuMemAddressReserve(sum(sizes), 0, 0, 0)))
    access = cu.CUmemAccessDesc()
    access.location, access.flags = properties(POSIX).location, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for chunk, size in zip(chunks, sizes):
        ok(cu.cuMemMap(at, size, 0, chunk, 0))
        ok(cu.cuMemSetAccess(at, size, [access], 1))
        ok(cu.cuMemRelease(chunk))
        at += size
    return base

def expandable_segment(sizes, handle_types=None):
    # As PyTorch's: several chunks, mapped one behind the other.
    types = handle_types or [POSIX] * len(sizes)
    return map_chunks([ok(cu.cuMemCreate(size, properties(kind), 0)) for size, kind in zip(sizes, types)], sizes)

def send(path, memory):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(path)
        socket.send_fds(sender, [b"x"], list(memory.fds))

def open_chunks(receiver, sizes):
    _, fds, _, _ = socket.recv_fds(receiver, 1, 253)
    chunks = [ok(cu.cuMemImportFromShareableHandle(fd, POSIX)) for fd in fds]
    for fd in fds:
        os.close(fd)
    return map_chunks(chunks, sizes)
"""


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = Control.create(tmp_path / "control")
    yield made
    made.reset()


def _needs_bindings() -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")


@pytest.fixture
def make_standin(paths: Paths, control: Control) -> Iterator[Callable[..., Child]]:
    """Makes processes over the stand-in, with the names above and the first device's context; keywords go into their environment."""
    _needs_bindings()
    made: list[Child] = []

    def make(**variables: str) -> Child:
        child = Child({**environment(paths, control), **variables})
        made.append(child)
        child.run(PRELUDE + NAMES)
        child.run("device_context()")
        return child

    yield make
    control.reset()
    for child in made:
        child.close()


@pytest.fixture(params=["standin", pytest.param("driver", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Child]]:
    """As `make_standin`, for what holds with the real driver too."""
    _needs_bindings()
    if request.param == "standin":
        yield request.getfixturevalue("make_standin")
        return
    made: list[Child] = []

    def make_real() -> Child:
        child = Child(os.environ)
        made.append(child)
        child.run(PRELUDE + NAMES)
        child.run("device_context()")
        return child

    yield make_real
    for child in made:
        child.close()


@pytest.fixture
def engine(make: Callable[[], Child]) -> Child:
    return make()


@pytest.fixture
def mover(make: Callable[[], Child]) -> Child:
    return make()
