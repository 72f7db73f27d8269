"""The stand-in driver, built once, and how to run tests over it.

A process keeps the driver that it has loaded, so what needs one runs in a process of its own: the files `inside/check_*.py`, whose names keep them out of an
ordinary run.
"""

import os
from pathlib import Path

import pytest

from ..standin.build import Paths, build, compiler
from ..standin.controls import Control, environment
from ..standin.kernels import build_kernels
from ..transfer.kernels.devices import gcc


@pytest.fixture(scope="session")
def standin_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the stand-in instead of a driver."""
    pytest.importorskip("cuda.bindings", reason="the package cuda-bindings is not installed")
    if compiler() is None:
        pytest.skip("gcc, which builds the stand-in driver, is not installed")
    folder: Path = tmp_path_factory.mktemp("cuda")
    paths = build(folder)
    # Not the user's choice of GPUs, but the stand-in's two.
    base = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**environment(paths, Control.create(folder / "control"), base), "OFFLOADD_TEST_STANDIN": str(paths.directory)}


@pytest.fixture(scope="session")
def kernels_environment(standin_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As `standin_environment`, with our kernels for the CPU and the double of CuPy."""
    if gcc() is None:
        pytest.skip("g++, which builds the kernels for the CPU, is not installed")
    directory = Path(standin_environment["OFFLOADD_TEST_STANDIN"])
    paths = Paths(directory, directory / "libcuda.so.1", directory / "libcufile.so.0")
    control = Control.create(tmp_path_factory.mktemp("kernels-control") / "control")
    base = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**environment(paths, control, base, kernels=build_kernels(tmp_path_factory.mktemp("kernels"))), "OFFLOADD_TEST_STANDIN": str(directory)}
