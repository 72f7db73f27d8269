"""Machines without a driver, or without cuda-bindings."""

import subprocess
import sys
from collections.abc import Callable

from ...standin.controls import Control
from ...standin_tests.child import Child

CALLS = """
import sys
from offloadd.client.cuda import export_event, export_pointer, new_event
from offloadd.errors import PathUnavailable
for call, values in ((export_pointer, (4096, 4096)), (export_event, (4096,)), (new_event, ())):
    try:
        call(*values)
    except PathUnavailable as error:
        print(error)
"""


def answers(before: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", before + CALLS], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_without_cuda_bindings_the_package_imports_and_its_use_says_what_is_missing() -> None:
    # None in sys.modules makes an import fail as if nothing were there.
    missing = answers("import sys; sys.modules['cuda'] = None")
    assert len(missing) == 3
    assert all("cuda-bindings, which is not installed" in line for line in missing)


def test_importing_the_client_loads_no_cuda_library() -> None:
    loaded = answers("import offloadd.client, offloadd.client.cuda, sys; print(*sys.modules); sys.modules['cuda'] = None")[0].split()
    assert "offloadd.client.cuda" in loaded
    assert not {"cuda", "torch", "cupy"} & set(loaded)


def test_a_driver_without_devices_is_named(make_standin: Callable[..., Child], control: Control) -> None:
    engine = make_standin()
    with control.fail("cuInit", 100):
        answer = engine.run("result = refusal(export_pointer, 4096, 4096)")
    assert answer == "PathUnavailable: the CUDA driver can't be used in this process: CUDA_ERROR_NO_DEVICE"


def test_a_machine_without_a_driver_is_told_so(make_standin: Callable[..., Child]) -> None:
    # The library fails to load as it does where there is none, whether or not this machine has one.
    engine = make_standin()
    answer = engine.run("""
        def missing(flags):
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        cu.cuInit, kept = missing, cu.cuInit
        result = refusal(new_event)
        cu.cuInit = kept
    """)
    assert answer == "PathUnavailable: there is no CUDA driver on this machine: Failed to dlopen libcuda.so.1"
