"""Builds the stand-ins for libcuda.so.1, libcufile.so.0 and libnvidia-ml.so.1 with the C compiler alone."""

import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
CUDA = ("control", "device", "memory_table", "memory", "host_memory", "ipc_memory", "chunks", "stream", "event", "copy", "module", "lookup")
CUFILE = ("cufile", "cufile_stats", "cufile_async", "system")
NVML = ("nvml",)
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--no-undefined")


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the built libraries lie; `directory` is what LD_LIBRARY_PATH needs."""

    directory: Path
    libcuda: Path
    libcufile: Path

    @property
    def libnvml(self) -> Path:
        """The management library."""
        return self.directory / "libnvidia-ml.so.1"


def compiler() -> str | None:
    """Path of gcc; None if there is none."""
    return shutil.which("gcc")


def build(directory: Path, *, flags: tuple[str, ...] = ()) -> Paths:
    """Builds into a folder below `directory` that is named by the sources and flags, unless they lie there already. Safe to call from several processes.

    Raises RuntimeError with what the compiler said, or if there is no gcc.
    """
    gcc = compiler()
    if gcc is None:
        raise RuntimeError("the stand-ins need gcc, and there is none in PATH")
    digest = hashlib.sha256(repr((gcc, FLAGS, flags)).encode())
    for source in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    target = directory / f"standin-{digest.hexdigest()[:16]}"
    paths = Paths(target, target / "libcuda.so.1", target / "libcufile.so.0")
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="building-", dir=directory))
        try:
            _link(gcc, flags, CUDA, made / paths.libcuda.name, ())
            for parts, library in ((CUFILE, paths.libcufile), (NVML, paths.libnvml)):
                _link(gcc, flags, parts, made / library.name, (f"-L{made}", f"-l:{paths.libcuda.name}", "-Wl,-rpath,$ORIGIN"))
            made.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return paths


def _link(gcc: str, flags: tuple[str, ...], parts: tuple[str, ...], target: Path, libraries: tuple[str, ...]) -> None:
    sources = [str(SOURCES / f"{part}.c") for part in parts]
    command = [gcc, *FLAGS, *flags, f"-Wl,-soname,{target.name}", "-o", str(target), *sources, *libraries, "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"building {target.name} failed: {done.stderr.strip()}")
