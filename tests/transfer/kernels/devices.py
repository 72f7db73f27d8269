"""Where the suite runs: memory that kernels reach by address, and the kernels. One class per implementation."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

from offloadd.transfer.kernels.cuda import CudaKernels
from offloadd.transfer.kernels.host import HostKernels
from offloadd.transfer.kernels.source import KERNELS, OPTIONS

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "offloadd" / "transfer" / "kernels"
SANITIZERS = ("-fsanitize=address,undefined", "-fsanitize-sections=cta_shared", "-fno-sanitize-recover=all")
#: What makes them C++, and a library of them.
SHIM = (HERE / "cuda_on_cpu.hpp", HERE / "kernels_on_cpu.cpp")
#: Kernels see bytes of payload as words: NVRTC and nvcc take that, C++ compilers would have to be told by memcpy. Fibers jump between stacks, which fortified
#: libraries refuse.
GENERAL = (
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
)
#: Launches of two tiles.
CHOPPED_COPY_BYTES_PER_S, CHOPPED_CRC_BYTES_PER_S = 33e6, 66e6


def gcc():
    """Path of g++, or None. Clang has no sanitizer for variables in sections of their own, as which shared memory is built."""
    return shutil.which("g++")


def compile_for_cpu(sources, library, *options, names=None):
    """Compile CUDA sources for the CPU. `names`: their kernels; without, KERNELS has them by the names of the sources."""
    names = names or [kernel for path in sources for kernel in KERNELS[path.name]]
    kernels = " ".join(f"KERNEL({kernel})" for kernel in names)
    includes = [option for path in (SHIM[0], *sources) for option in ("-include", path)]
    command = [gcc(), *OPTIONS, *GENERAL, *options, f"-DKERNELS={kernels}", *includes, SHIM[1], "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def build(folder, *options):
    """Compile the kernels for the CPU; the library's path."""
    library = folder / "kernels_on_cpu.so"
    compile_for_cpu([SOURCES / name for name in sorted(KERNELS)], library, *options)
    return library


class Chopped(CudaKernels):
    """With small launches, unless a rate is named."""

    def __init__(self, launcher):
        super().__init__(launcher, crc_bytes_per_s=CHOPPED_CRC_BYTES_PER_S)

    def gather(self, *arguments, **options):
        super().gather(*arguments, **{"bytes_per_s": CHOPPED_COPY_BYTES_PER_S, **options})

    def scatter(self, *arguments, **options):
        super().scatter(*arguments, **{"bytes_per_s": CHOPPED_COPY_BYTES_PER_S, **options})


class HostBuffer:
    """A copy of an array in host memory, exactly as long, for the sanitizer to see what lies outside."""

    def __init__(self, values):
        self._bytes = np.empty(values.nbytes, dtype=np.uint8)
        self._bytes[:] = np.frombuffer(values.tobytes(), dtype=np.uint8)
        self._dtype = values.dtype
        self.address = self._bytes.ctypes.data

    def get(self):
        return self._bytes.view(self._dtype).copy()


class HostDevice:
    """The NumPy twin."""

    put = HostBuffer

    def __init__(self):
        self.kernels = self.chopped = HostKernels()


class CpuLauncher:
    """A `Launcher` that runs each kernel to its end before it returns."""

    def __init__(self, library):
        self._launch = ctypes.CDLL(str(library)).launch
        self._uploaded = []

    def upload(self, values):
        self._uploaded.append(HostBuffer(values))
        return self._uploaded[-1].address

    def launch(self, kernel, grid, threads, arguments, stream):
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        assert self._launch(kernel.encode(), *grid, threads, values, len(arguments)) == 1, f"no kernel {kernel} of {len(arguments)} parameters"


class CpuDevice:
    """The CUDA sources, compiled for the CPU."""

    put = HostBuffer

    def __init__(self, library):
        launcher = CpuLauncher(library)
        self.kernels = CudaKernels(launcher)
        self.chopped = Chopped(launcher)


class CupyDevice:
    """The CUDA sources on the first GPU, launches on a stream of their own."""

    def __init__(self, cupy):
        from offloadd.transfer.kernels.cupy_launcher import CupyLauncher, compiled_kernels

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        launcher = CupyLauncher(0, compiled_kernels(0))
        self.kernels = _OnStream(CudaKernels(launcher), self._stream.ptr)
        self.chopped = _OnStream(Chopped(launcher), self._stream.ptr)

    def put(self, values):
        return _CupyBuffer(self._cupy, self._stream, values)


class _OnStream:
    def __init__(self, kernels, stream):
        self._kernels, self._stream = kernels, stream

    def __getattr__(self, name):
        def call(*arguments, **options):
            getattr(self._kernels, name)(*arguments, **options, stream=self._stream)

        return call


class _CupyBuffer:
    def __init__(self, cupy, stream, values):
        self._stream = stream
        with stream:
            # CuPy gives an empty array no address.
            self._bytes = cupy.asarray(np.frombuffer(values.tobytes() or b"\0", dtype=np.uint8))
        stream.synchronize()
        self._length, self._dtype = values.nbytes, values.dtype
        self.address = int(self._bytes.data.ptr)

    def get(self):
        return self._bytes.get(stream=self._stream)[: self._length].view(self._dtype)
