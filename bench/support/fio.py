"""What fio says of the device, from outside: the same bytes, the same number of threads, the same length of an I/O."""

import json
import shutil
import subprocess
from pathlib import Path


def fio_bytes_per_s(path: Path, *, offset: int, size_bytes: int, io_bytes: int, threads: int, rounds: int) -> float | None:
    """Bytes a second of O_DIRECT reads of `size_bytes` from `offset` on, cut evenly over the threads; None without fio, or if it fails there."""
    program = shutil.which("fio")
    share = size_bytes // threads // io_bytes * io_bytes
    if program is None or share == 0:
        return None
    command = [
        program,
        "--name=ceiling",
        f"--filename={path}",
        "--rw=read",
        "--ioengine=psync",
        "--direct=1",
        "--readonly",
        "--thread",
        "--group_reporting",
        "--output-format=json",
        f"--bs={io_bytes}",
        f"--numjobs={threads}",
        f"--offset={offset}",
        f"--offset_increment={share}",
        f"--size={share}",
        f"--loops={rounds}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    try:
        return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])
    except (json.JSONDecodeError, KeyError, IndexError):
        return None
