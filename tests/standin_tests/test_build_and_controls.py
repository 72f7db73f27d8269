"""The stand-ins are built once, and agree with what they stand in for and with the controls."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ..standin.block import FAULTS, LAYOUT, Counters
from ..standin.build import SOURCES, Paths, build
from ..standin.controls import CUPY, Control, environment, wait_until

ROOT = Path(__file__).parents[2]


def python(code: str, **variables: str) -> str:
    """Output of code in a process of its own: what it loads must not stay in this one."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wheel_file(wheel: str, module: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder).joinpath(*parts)).exists():
            return path
    pytest.skip(f"the wheel {wheel} is not installed")


def test_the_controls_have_the_layout_of_the_sources(paths: Paths) -> None:
    sizes, names = python(f"""
import ctypes
library = ctypes.CDLL({str(paths.libcuda)!r})
sizes = (ctypes.c_uint64 * 3)()
library.standin_layout(sizes)
print(*sizes)
print(ctypes.string_at(library.standin_counter_names).decode())
""").splitlines()
    assert tuple(map(int, sizes.split())) == LAYOUT
    assert names.rstrip(",").split(",") == [field.name for field in fields(Counters)]


def flat_fields(header: str, struct: str) -> list[str]:
    found = re.search(rf"typedef struct {struct} \{{(.*?)\n\}}", header, re.DOTALL)
    assert found is not None
    return re.findall(r"(\w+)(?:\[\d+\])?\s*[,;]", re.sub(r"/\*.*?\*/", "", found[1]))


def test_the_declared_abi_of_cufile_is_that_of_the_real_header(paths: Paths, tmp_path: Path) -> None:
    real = wheel_file("nvidia-cufile", "nvidia", "cu13", "include", "cufile.h")
    header = (SOURCES / "cufile_abi.h").read_text()
    flat = {
        "CUfileError": 2,
        "CUfileOpCounter": 2,
        "CUfileStatsLevel1": 45,
        "CUfileStatsLevel2": 3,
        "CUfilePerGpuStats": 30,
        "CUfileStatsLevel3": 3,
        "CUfileIOEvents": 3,
    }
    offsets = []
    for struct, least in flat.items():
        names = flat_fields(header, struct)
        assert len(names) >= least, (struct, names)
        offsets += [(f"struct {struct}", name) for name in names]
    offsets += [("struct CUfileDescr_t", name) for name in ("type", "handle.fd", "fs_ops")]
    offsets += [
        ("struct CUfileDrvProps", f"nvfs.{name}") for name in ("major_version", "minor_version", "poll_thresh_size", "max_direct_io_size", "dstatusflags")
    ]
    offsets += [("struct CUfileDrvProps", name) for name in ("nvfs.dcontrolflags", "fflags", "max_device_cache_size", "per_buffer_cache_size")]
    offsets += [("struct CUfileDrvProps", name) for name in ("max_device_pinned_mem_size", "max_batch_io_size", "max_batch_io_timeout_msecs")]
    offsets += [("struct CUfileIOParams", f"u.batch.{name}") for name in ("devPtr_base", "file_offset", "devPtr_offset", "size")]
    offsets += [("struct CUfileIOParams", name) for name in ("mode", "fh", "opcode", "cookie")]
    constants = re.findall(r"\b(CU_?FILE_\w+) = ", header)
    assert len(constants) > 25
    lines = [f'printf("%zu {struct}.{name}\\n", offsetof({struct}, {name}));' for struct, name in offsets]
    lines += [f'printf("%zu {struct}\\n", sizeof({struct}));' for struct in {struct for struct, _ in offsets}]
    lines += [f'printf("%d {name}\\n", (int){name});' for name in constants]
    (tmp_path / "cuda.h").write_text("#pragma once\ntypedef int CUresult;\ntypedef struct CUstream_st *CUstream;\n")
    (tmp_path / "main.c").write_text(
        "#include HEADER\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(sorted(lines)) + "\nreturn 0;\n}\n"
    )
    printed = []
    for include in (SOURCES / "cufile_abi.h", real):
        program = tmp_path / "program"
        command = ["gcc", "-D_GNU_SOURCE", f'-DHEADER="{include}"', f"-I{tmp_path}", "-o", str(program), str(tmp_path / "main.c")]
        subprocess.run(command, check=True, capture_output=True)
        printed.append(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    assert printed[0] == printed[1]
    # What the daemon reads without a header.
    for line in ("624 struct CUfileStatsLevel1", "1136 struct CUfileStatsLevel2", "5112 struct CUfileStatsLevel3", "1136 struct CUfileStatsLevel3.num_gpus"):
        assert line in printed[0].splitlines()
    assert "1144 struct CUfileStatsLevel3.per_gpu_stats" in printed[0].splitlines()


@pytest.mark.parametrize(("header", "library", "least"), [("cuda.hpp", "libcuda", 34), ("cufile.hpp", "libcufile", 22)])
def test_every_function_that_kvikio_looks_up_is_there(paths: Paths, header: str, library: str, least: int) -> None:
    wanted = re.findall(r"decltype\((\w+)\)", wheel_file("libkvikio-cu13", "libkvikio", "include", "kvikio", "shim", header).read_text())
    wanted += ["cuMemcpyBatchAsync"] if library == "libcuda" else []
    assert len(wanted) >= least
    path = getattr(paths, library)
    code = f"import ctypes; library = ctypes.CDLL({str(path)!r}); print(*[n for n in {wanted} if not any(hasattr(library, n + v) for v in ('', '_v2', '_v4'))])"
    assert python(code) == ""


def test_building_again_builds_nothing(paths: Paths) -> None:
    before = paths.libcuda.stat().st_mtime_ns
    assert build(paths.directory.parent) == paths
    assert paths.libcuda.stat().st_mtime_ns == before
    assert [path.name for path in paths.directory.parent.iterdir() if path.name.startswith("building-")] == []


def test_a_build_that_fails_says_what_the_compiler_said(paths: Paths, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 failed.*no-such-file"):
        build(tmp_path, flags=("-include", "no-such-file.h"))
    assert list(tmp_path.iterdir()) == []


def test_without_gcc_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="need gcc"):
        build(tmp_path)


def test_the_process_that_loads_them_sees_its_own_counters_and_device_memory(paths: Paths, control: Control, tmp_path: Path) -> None:
    Control.create(tmp_path / "other")
    code = f"""
import ctypes
from pathlib import Path
from tests.standin.build import Paths
from tests.standin.controls import Control, load
directory = Path({str(paths.directory)!r})
paths, control = Paths(directory, directory / "libcuda.so.1", directory / "libcufile.so.0"), Control(Path({str(control.path)!r}))
loaded = load(paths, control)
cuda, context, pointer = loaded.cuda, ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), 64) == 0
loaded.host_view(pointer.value, 64)[:] = b"x" * 64
buffer = ctypes.create_string_buffer(64)
assert cuda.cuMemcpyDtoH_v2(buffer, pointer, 64) == 0 and buffer.raw == b"x" * 64
assert control.process().counters.device_to_host_bytes == 64 and control.process().calls["cuMemAlloc"] == 1
try:
    load(paths, Control(Path({str(tmp_path / "other")!r})))
except RuntimeError as error:
    print(error)
"""
    assert "uses the control block" in python(code)
    assert [process.counters.allocations_now for process in control] == [1]


def test_a_control_block_of_other_sources_is_refused(paths: Paths, control: Control, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(control.path.stat().st_size))
    with pytest.raises(ValueError, match="no control block"):
        Control(other)
    other.write_bytes(b"short")
    code = f"import ctypes; ctypes.CDLL({str(paths.libcuda)!r}).cuInit(0)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "CUDA_STANDIN_CONTROL": str(other)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "was made by other sources" in done.stderr


def test_limits_of_the_controls_are_told(control: Control, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device_count 17"):
        Control.create(tmp_path / "many", device_count=17)
    with pytest.raises(ValueError, match="longer than 47"):
        control.fail("f" * 48, 1)
    for _ in range(FAULTS):
        control.fail("cuInit", 1)
    with pytest.raises(RuntimeError, match="32 faults"):
        control.fail("cuInit", 1)
    control.reset()
    control.fail("cuInit", 1)
    with pytest.raises(TimeoutError, match="nothing"):
        wait_until(lambda: False, "nothing", timeout_s=0.0)


def test_the_environment_keeps_what_was_there(paths: Paths, control: Control) -> None:
    made = environment(paths, control, {"LD_LIBRARY_PATH": "/a", "LD_PRELOAD": "/b.so", "OTHER": "c"})
    assert made == {
        "LD_LIBRARY_PATH": f"{paths.directory}:/a",
        "LD_PRELOAD": f"{paths.libcufile}:/b.so",
        "CUDA_STANDIN_CONTROL": str(control.path),
        "OTHER": "c",
    }
    with_kernels = environment(paths, control, {"PYTHONPATH": "/d"}, kernels=Path("/k"))
    assert (with_kernels["PYTHONPATH"], with_kernels["CUDA_STANDIN_KERNELS"]) == (f"{CUPY}:/d", "/k")
