"""Runs the checks in `inside`, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"
#: With kernels.
INSIDE_KERNELS = Path(__file__).parent / "inside_kernels"
CHECKS = sorted(path.name for path in INSIDE.glob("check_*.py"))
KERNEL_CHECKS = sorted(path.name for path in INSIDE_KERNELS.glob("check_*.py"))


def run_checks(name: str, environment: dict[str, str], *arguments: str, folder: Path = INSIDE) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *arguments, str(folder / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", CHECKS)
def test_over_the_stand_in(name: str, standin_environment: dict[str, str]) -> None:
    run_checks(name, standin_environment)


@pytest.mark.parametrize("name", KERNEL_CHECKS)
def test_kernels_over_the_stand_in(name: str, kernels_environment: dict[str, str]) -> None:
    run_checks(name, kernels_environment, folder=INSIDE_KERNELS)


@pytest.mark.gpu
def test_kernels_over_the_real_driver() -> None:
    pytest.importorskip("cuda.bindings", reason="the package cuda-bindings is not installed")
    pytest.importorskip("cupy", reason="CuPy is not installed")
    run_checks("check_kernel_copies.py", {key: value for key, value in os.environ.items() if key != "OFFLOADD_TEST_STANDIN"}, folder=INSIDE_KERNELS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["check_copies.py"])
def test_over_the_real_driver(name: str) -> None:
    pytest.importorskip("cuda.bindings", reason="the package cuda-bindings is not installed")
    run_checks(name, {key: value for key, value in os.environ.items() if key != "OFFLOADD_TEST_STANDIN"})
