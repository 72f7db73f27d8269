"""What moving a byte costs the machine beside time: traffic of host memory, where something counts it."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

#: One CAS command of AMD's unified memory controller moves a line.
_LINE_BYTES = 64
_UNIT_BYTES = {"": 1.0, "Bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_TIMEOUT_S = 60.0


class Uncounted(Exception):
    """Nothing counts memory traffic here, or it gave no number; says why."""


@dataclass(slots=True)
class Traffic:
    """Bytes that passed between the processors and memory; set when the `with` block of `counting` ends. `fault`: why there is no number."""

    size_bytes: float | None = None
    fault: str = ""


class TrafficCounter(Protocol):
    """Counts the whole machine's memory traffic. `note` says what is counted, and by what."""

    note: str

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count what happens within."""


def find_counter(sys: Path = Path("/sys"), perf: str | None = None) -> TrafficCounter:
    """perf's counts of the memory controllers, else resctrl's of the caches' misses. `sys`: where sysfs is mounted. Raises Uncounted."""
    events = controller_events(sys)
    program = perf or shutil.which("perf")
    if not events:
        without_perf = "the kernel shows no counters of memory controllers (uncore_imc, amd_umc); virtual machines have none"
    elif program is None:
        without_perf = "perf is not installed"
    else:
        try:
            return _proven(PerfCounter(program, events))
        except Uncounted as error:
            without_perf = str(error)
    groups = sorted(sys.glob("fs/resctrl/mon_data/mon_L3_*/mbm_total_bytes"))
    if not groups:
        raise Uncounted(f"{without_perf}; resctrl is not mounted, or counts no memory bandwidth (mount -t resctrl resctrl /sys/fs/resctrl)")
    return _proven(ResctrlCounter(groups))


def _proven(counter: TrafficCounter) -> TrafficCounter:
    with counter.counting() as traffic:
        pass
    if traffic.size_bytes is None:
        raise Uncounted(traffic.fault)
    return counter


def controller_events(sys: Path) -> list[str]:
    """Names for `perf stat -e` of all reads and writes of all memory controllers."""
    devices = sys / "bus/event_source/devices"
    found = []
    for device in sorted(devices.glob("uncore_imc*")):
        # The free-running counters of client processors have other names, and count the same again.
        names = ("cas_count_read", "cas_count_write") if (device / "events/cas_count_read").exists() else ("data_read", "data_write")
        found += [f"{device.name}/{name}/" for name in names if (device / "events" / name).exists()]
    for device in sorted(devices.glob("amd_umc_*")):
        # umc_cas_cmd.rd and .wr of Zen 4 and later.
        found += [f"{device.name}/event=0x0a,rdwrmask={mask:#x}/" for mask in (1, 2) if (device / "format/rdwrmask").exists()]
    return found


@dataclass(slots=True)
class PerfCounter:
    """By `perf stat` of all CPUs, beside what is measured."""

    program: str
    events: list[str]
    note: str = field(default="perf stat of the memory controllers: all traffic of the machine, DMA included", init=False)

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """See `TrafficCounter`."""
        traffic = Traffic()
        with tempfile.TemporaryDirectory(prefix="offloadd-bench-") as folder:
            output = Path(folder) / "counts"
            # What perf runs tells when the counters are on, and ends with its standard input.
            command = [self.program, "stat", "-a", "-x", ",", "-o", str(output), "-e", ",".join(self.events), "--", "sh", "-c", "echo on; read line"]
            environment = {**os.environ, "LC_ALL": "C"}
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
                assert process.stdin is not None and process.stdout is not None and process.stderr is not None
                process.stdout.readline()
                try:
                    yield traffic
                finally:
                    process.stdin.close()
                    said = process.stderr.read().strip().splitlines()
                    process.wait(_TIMEOUT_S)
            try:
                traffic.size_bytes = perf_bytes(output.read_text(errors="replace") if output.exists() else "")
            except Uncounted as error:
                traffic.fault = " ".join([str(error), *said[:1]])


def perf_bytes(text: str) -> float:
    """Bytes that the lines of `perf stat -x ,` count together. Raises Uncounted where one of them has no number."""
    total, lines = 0.0, 0
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) < 3 or line.startswith("#"):
            continue
        lines += 1
        value, unit, event = fields[:3]
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
            raise Uncounted(f"perf says {value} of {event}.")
        if unit not in _UNIT_BYTES:
            raise Uncounted(f"perf counts {event} in {unit!r}, which is no unit of bytes.")
        total += float(value) * (_UNIT_BYTES[unit] if unit else _LINE_BYTES)
    if not lines:
        raise Uncounted("perf counted nothing.")
    return total


@dataclass(slots=True)
class ResctrlCounter:
    """By the monitoring counters of the root group of resctrl: traffic of tasks that are in no other group."""

    files: list[Path]
    note: str = field(default="resctrl (MBM) of the root group: misses of the last-level caches, without DMA", init=False)

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """See `TrafficCounter`."""
        traffic = Traffic()
        before = self._read(traffic)
        yield traffic
        after = self._read(traffic)
        if before is not None and after is not None:
            traffic.size_bytes = float(after - before)

    def _read(self, traffic: Traffic) -> int | None:
        total = 0
        for file in self.files:
            text = file.read_text().strip()
            if not text.isdecimal():
                # "Unavailable" and "Error" are what the kernel writes.
                traffic.fault = f"{file} says {text!r}"
                return None
            total += int(text)
        return total
