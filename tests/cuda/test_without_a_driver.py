"""The package is there on machines without CUDA, and says what is missing."""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

import offloadd.cuda

MODULES = sorted(f"offloadd.cuda.{path.stem}" for path in Path(offloadd.cuda.__file__).parent.glob("*.py") if path.stem != "__init__")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_importing_the_package_loads_nothing_of_cuda() -> None:
    code = f"import sys, {', '.join(MODULES)}; print([name for name in sys.modules if name == 'cuda' or name.startswith('cuda.')])"
    assert run(code) == "[]\n"


def test_without_the_bindings_the_missing_package_is_named() -> None:
    code = "import sys; sys.modules['cuda'] = None; from offloadd.cuda.driver import available; print(available())"
    answer = run(code)
    assert "cuda-bindings can't be imported" in answer and "cuda13" in answer


def test_without_a_driver_the_missing_library_is_named() -> None:
    pytest.importorskip("cuda.bindings", reason="the package cuda-bindings is not installed")
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a CUDA driver")
    assert "libcuda.so.1 can't be loaded" in run("from offloadd.cuda.driver import available; print(available())")
