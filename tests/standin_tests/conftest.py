import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..standin.build import Paths, build, compiler
from ..standin.controls import Control, environment
from ..standin.kernels import build_kernels
from ..transfer.kernels.devices import gcc
from .child import PRELUDE, Child


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = Control.create(tmp_path / "control")
    yield control
    control.reset()


@pytest.fixture
def make_child(paths: Paths, control: Control) -> Iterator[Callable[..., Child]]:
    """Makes processes over the stand-ins, with `cu`, `ok` and `error` of the prelude; keywords go into their environment."""
    needs("cuda.bindings")
    made: list[Child] = []

    def make(**variables: str) -> Child:
        child = Child({**environment(paths, control), **variables})
        made.append(child)
        child.run(PRELUDE)
        return child

    yield make
    control.reset()
    for child in made:
        child.close()


@pytest.fixture(scope="session")
def kernels(paths: Paths) -> Path:
    if gcc() is None:
        pytest.skip("g++, which compiles the kernels for the CPU, is not installed")
    return build_kernels(paths.directory.parent)


@pytest.fixture
def make_kernel_child(make_child: Callable[..., Child], paths: Paths, control: Control, kernels: Path) -> Callable[[], Child]:
    """As `make_child`, with the double of CuPy."""
    return lambda: make_child(**environment(paths, control, kernels=kernels))


@pytest.fixture
def child(make_child: Callable[..., Child]) -> Child:
    """A process with the first device's context."""
    child = make_child()
    child.run("device = device_context()")
    return child


@pytest.fixture(params=["standin", pytest.param("driver", marks=pytest.mark.gpu)])
def make_driver_child(request: pytest.FixtureRequest) -> Iterator[Callable[[], Child]]:
    """As `make_child`, for what must hold with the real driver too: each has the first device's context."""
    needs("cuda.bindings")
    if request.param == "standin":
        make_standin_child = request.getfixturevalue("make_child")
    made: list[Child] = []

    def make() -> Child:
        if request.param == "standin":
            child: Child = make_standin_child()
        else:
            child = Child(os.environ)
            made.append(child)
            child.run(PRELUDE)
        child.run("device = device_context()")
        return child

    yield make
    for child in made:
        child.close()


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A file of 8 MiB with random bytes."""
    path = tmp_path / "volume"
    path.write_bytes(os.urandom(8 << 20))
    return path
