"""What the CuPy launcher asks of CuPy, with a CuPy that compiles nothing and launches on the CPU. The real one runs the suite under `-m gpu`."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from crc32c import crc32c

from offloadd.transfer.kernels import cupy_launcher
from offloadd.transfer.kernels.base import Slots
from offloadd.transfer.kernels.source import OPTIONS

from .devices import CpuLauncher, HostBuffer, build, gcc


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """The double: `log` has each compilation and launch with the device and stream that were current."""
    if gcc() is None:
        pytest.skip("no g++, which compiles the CUDA sources for the CPU")
    launcher = CpuLauncher(build(tmp_path))
    module = ModuleType("cupy")
    module.log, module.current = [], {"device": None, "stream": None}

    @contextmanager
    def current(name, value):
        before, module.current[name] = module.current[name], value
        yield
        module.current[name] = before

    class RawModule:
        def __init__(self, *, code, options):
            assert "__global__" in code and options == OPTIONS
            module.log.append(("compile", module.current["device"]))

        def get_function(self, kernel):
            def run(grid, block, arguments):
                assert isinstance(grid, tuple) and len(block) == 1 and {type(argument) for argument in arguments} == {np.uint64}
                module.log.append((kernel, module.current["device"], module.current["stream"]))
                launcher.launch(kernel, grid, block[0], [int(argument) for argument in arguments], 0)

            return run

    def asarray(values):
        copy = HostBuffer(values)
        return SimpleNamespace(data=SimpleNamespace(ptr=copy.address), copy=copy)

    module.RawModule, module.asarray = RawModule, asarray
    module.cuda = SimpleNamespace(
        Device=lambda number: current("device", number),
        ExternalStream=lambda pointer, device: current("stream", (pointer, device)),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: module.log.append(("synchronize", module.current["device"]))),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    cupy_launcher.compiled_kernels.cache_clear()
    yield module
    cupy_launcher.compiled_kernels.cache_clear()


def test_launches_go_to_the_device_and_the_stream_and_sources_are_compiled_once(cupy):
    kernels = cupy_launcher.open_cupy_kernels(3)
    cupy_launcher.open_cupy_kernels(3)
    assert cupy.log == [("compile", 3), ("compile", 3), ("synchronize", 3), ("synchronize", 3)]
    cupy.log.clear()
    payload, lengths, crcs = HostBuffer(np.arange(100, dtype=np.uint8)), HostBuffer(np.array([100], dtype="<u8")), HostBuffer(np.zeros(1, dtype="<u4"))
    kernels.checksums(Slots(payload.address, 0), 1, lengths.address, 100, crcs.address, stream=1 << 40)
    assert crcs.get().tolist() == [crc32c(bytes(range(100)))]
    assert cupy.log == [("crc32c_begin", 3, (1 << 40, 3)), ("crc32c_pieces", 3, (1 << 40, 3))]
