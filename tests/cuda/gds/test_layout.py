"""The declared layout of cuFile's statistics is that of the real cufile.h."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import pytest

from offloadd.cuda.cufile_stats import PerGpuStats, StatsLevel3

from ...standin.build import compiler

# The header asks for cuda.h, of which it needs these names.
CUDA_H = "typedef enum { CUDA_SUCCESS = 0 } CUresult; typedef struct CUstream_st *CUstream;\n"


def header() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(folder).glob("*/include/cufile.h")):
            return found
    pytest.skip("the wheel nvidia-cufile is not installed")


def test_offsets_and_sizes_are_those_of_cufile_h(tmp_path: Path) -> None:
    gcc = compiler()
    if gcc is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "cuda.h").write_text(CUDA_H)
    members = [("CUfilePerGpuStats_t", PerGpuStats), ("CUfileStatsLevel3_t", StatsLevel3)]
    lines = [f'printf("%zu\\n", offsetof({name}, {field[0]}));' for name, struct in members for field in struct._fields_]
    lines += [f'printf("%zu\\n", sizeof({name}));' for name, _ in members]
    source = tmp_path / "layout.c"
    source.write_text(
        f"#include <stdbool.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <sys/types.h>\n#include <cufile.h>\nint main(void) {{ {''.join(lines)} }}\n"
    )
    subprocess.run([gcc, f"-I{tmp_path}", f"-I{header().parent}", str(source), "-o", str(tmp_path / "layout")], check=True)
    theirs = [int(line) for line in subprocess.run([str(tmp_path / "layout")], capture_output=True, check=True, text=True).stdout.split()]
    ours = [getattr(struct, field[0]).offset for _, struct in members for field in struct._fields_]
    assert theirs == ours + [ctypes.sizeof(struct) for _, struct in members]
