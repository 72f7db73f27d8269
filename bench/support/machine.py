"""Where a result was measured: machine, kernel, file system, versions, commit."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from offloadd import __version__
from offloadd.tiers.volume_io import file_system_of
from offloadd.transfer.checksum import choose_fastest
from offloadd.transfer.native import NativeUnavailableError, load
from offloadd.units import GIB

ROOT = Path(__file__).resolve().parents[2]


def machine_record(directory: Path) -> dict[str, str | int | float]:
    """Facts about this machine; `directory` is where volumes are made."""
    return {
        "machine": platform.machine(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 2),
        "file_system": _file_system(directory),
        "device": _device(directory),
        "python": platform.python_version(),
        "offloadd": __version__,
        "crc32c_by": choose_fastest(),
        "copies_by": _copies_by(),
        "numpy": metadata.version("numpy"),
        "grpcio": metadata.version("grpcio"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _copies_by() -> str:
    try:
        return f"C with {load().ways}"
    except NativeUnavailableError as error:
        return f"NumPy: {error}"


def _first(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def _file_system(directory: Path) -> str:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return file_system_of(fd)
    finally:
        os.close(fd)


def _device(directory: Path) -> str:
    number = directory.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return "none"
    name = link.resolve().name
    model = link / "device" / "model"
    return f"{name} {model.read_text().strip()}" if model.exists() else name


def _commit() -> str:
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "offloadd", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit
