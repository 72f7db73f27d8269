"""The implementations that the suite runs against."""

import os
from pathlib import Path

import pytest

from .devices import CpuDevice, CupyDevice, HostDevice, build, gcc


@pytest.fixture(scope="session", params=["numpy", "cpu", pytest.param("cupy", marks=pytest.mark.gpu)])
def device(request, tmp_path_factory):
    """`kernels`, `chopped` (the same with small launches) and `put`, which copies an array to where the kernels reach it."""
    if request.param == "numpy":
        return HostDevice()
    if request.param == "cpu":
        # A library that was built with sanitizers, by test_sanitizers.py.
        if library := os.environ.get("OFFLOADD_TEST_KERNELS_ON_CPU"):
            return CpuDevice(Path(library))
        if gcc() is None:
            pytest.skip("no g++, which compiles the CUDA sources for the CPU")
        return CpuDevice(build(tmp_path_factory.mktemp("kernels")))
    cupy = pytest.importorskip("cupy", reason="no CuPy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU")
    return CupyDevice(cupy)
