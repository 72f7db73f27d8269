"""The C library's suite once more with address and undefined-behaviour sanitizers, in a process of its own: the runtime must be loaded before Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .moves import WIDTHS, build, compiler

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runtime():
    if compiler() is None:
        pytest.skip("no C compiler")
    path = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("the C compiler has no address sanitizer")
    return path


def _sanitized(runtime, library, *arguments):
    # Python frees little at its end, so leaks say nothing. Its own allocator would hide where an array ends.
    surroundings = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OFFLOADD_TEST_MOVES": library,
    }
    return subprocess.run([sys.executable, *arguments], env=os.environ | surroundings, cwd=HERE.parents[1], capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module", params=WIDTHS)
def library(request, runtime, tmp_path_factory):
    return build(tmp_path_factory.mktemp("sanitized"), "-fsanitize=address,undefined", "-fno-sanitize-recover=all", width=request.param)


@pytest.mark.timeout(1500)
def test_the_suite_passes_under_sanitizers(runtime, library):
    only = "checksum or gather or scatter or window or outside"
    done = _sanitized(runtime, library, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"({only}) and 512", str(HERE / "test_native.py"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


CODE = """
import os
import numpy as np
from offloadd.transfer.gather import Payloads
from offloadd.transfer.native import Library
memory = np.ones({engine}, np.uint8)
views = (np.lib.stride_tricks.as_strided(memory, (3, 2, 100), (200, 100, 1)),)
Library(os.environ["OFFLOADD_TEST_MOVES"]).pieces(views).gather(np.array([1]), Payloads(np.zeros(300, np.uint8), np.array([0]), 300), 0, None)
print("ended")
"""


@pytest.mark.parametrize("engine", [600, 599])
def test_the_sanitizer_sees_one_byte_too_many(runtime, library, engine):
    done = _sanitized(runtime, library, "-c", CODE.format(engine=engine))
    assert ("ended" in done.stdout) == (engine == 600), done.stdout + done.stderr
    assert ("heap-buffer-overflow" in done.stderr) == (engine == 599)
