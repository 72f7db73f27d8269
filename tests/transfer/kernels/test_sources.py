"""The CUDA sources are what both compilers take: nvcc, and NVRTC, which has no header of the host."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.transfer.kernels.source import KERNELS, OPTIONS, source

from .devices import SOURCES

ARCHITECTURES = ["80", "90", "100"]


def test_every_source_is_part_of_the_package_and_includes_nothing():
    assert sorted(KERNELS) == sorted(path.name for path in SOURCES.glob("*.cu"))
    for name in KERNELS:
        assert "#include" not in source(name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_nvcc_compiles_without_a_warning_or_a_spill(name, architecture, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, timeout=120, check=True).stdout.split()
    if f"compute_{architecture}" not in known:
        pytest.skip(f"nvcc does not know sm_{architecture}")
    strict = ["-Werror", "all-warnings", "-Xptxas", "-v"]
    command = [nvcc, *OPTIONS, *strict, f"-arch=sm_{architecture}", "-cubin", "-o", str(tmp_path / "kernels.cubin"), str(SOURCES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    properties = re.findall(r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert sorted(properties) == sorted((kernel, "0", "0", "0") for kernel in KERNELS[name])


def _nvrtc():
    """NVRTC of the system or of a wheel (nvidia-cuda-nvrtc), or None."""
    wheels = [str(path) for folder in sys.path for path in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.*"))]
    for name in ["libnvrtc.so.13", "libnvrtc.so.12", *wheels]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_nvrtc_compiles_without_a_word(name, architecture):
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("no NVRTC")
    count = ctypes.c_int()
    assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    known = (ctypes.c_int * count.value)()
    assert nvrtc.nvrtcGetSupportedArchs(known) == 0
    if int(architecture) not in known:
        pytest.skip(f"NVRTC does not know sm_{architecture}")
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source(name).encode(), name.encode(), 0, None, None) == 0
    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=sm_{architecture}")]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    assert (code, log.value) == (0, b"")
