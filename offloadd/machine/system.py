"""The files of a machine under one root, so that a directory tree can stand in for the machine."""

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: What reading a file that a kernel or a container does not offer answers. ENODEV, EINVAL and EOPNOTSUPP come from attributes of sysfs, ESRCH from a process
#: that has just ended.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO, errno.ESRCH})


@dataclass(frozen=True, slots=True)
class System:
    """Names are absolute, as the machine itself sees them; `path` puts the root before them."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Where `name` lies for this process."""
        return self.root / name.lstrip("/")

    def exists(self, name: str) -> bool:
        """Whether there is anything of this name."""
        return os.path.lexists(self.path(name))

    def text(self, name: str) -> str | None:
        """What a file says, without white space at its ends; None if it is not there or may not be read. Raises OSError for everything else."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise

    def number(self, name: str) -> int | None:
        """The whole number that a file says; None if it is not there or says something else."""
        text = self.text(name)
        return int(text) if text is not None and re.fullmatch(r"-?[0-9]+", text) else None

    def names(self, directory: str) -> list[str]:
        """What a directory holds, in order; empty if it is not there."""
        try:
            return sorted(entry.name for entry in self.path(directory).iterdir())
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise

    def real(self, name: str) -> str:
        """`name` with its links followed, as far as they stay under the root."""
        root = Path(os.path.realpath(self.root))
        followed = Path(os.path.realpath(self.path(name)))
        return f"/{followed.relative_to(root)}" if followed.is_relative_to(root) and followed != root else name

    def kernel(self) -> tuple[int, int]:
        """(major, minor) of the running kernel; (0, 0) if it does not say."""
        match = re.match(r"([0-9]+)\.([0-9]+)", self.text("/proc/sys/kernel/osrelease") or "")
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def limit(self, name: str, process: str = "self", *, hard: bool = False) -> int | None:
        """A soft limit of /proc/PROCESS/limits, such as `Max open files`, or the hard one; None if it is unlimited or not told."""
        match = re.search(rf"^{re.escape(name)}\s+([0-9]+|unlimited)\s+([0-9]+|unlimited)\s", self.text(f"/proc/{process}/limits") or "", re.MULTILINE)
        value = "unlimited" if match is None else match[2 if hard else 1]
        return None if value == "unlimited" else int(value)

    def status(self, key: str, process: str = "self") -> str:
        """A line of /proc/PROCESS/status, such as `Seccomp`; empty if it is not there."""
        match = re.search(rf"^{re.escape(key)}:\s*(.*)$", self.text(f"/proc/{process}/status") or "", re.MULTILINE)
        return match[1].strip() if match else ""

    def has_capability(self, bit: int, process: str = "self") -> bool:
        """Whether a process has the capability of that number in effect."""
        return bool(int(self.status("CapEff", process) or "0", 16) >> bit & 1)

    def modules(self) -> frozenset[str] | None:
        """Names of the loaded kernel modules; None where /proc/modules is missing."""
        text = self.text("/proc/modules")
        return None if text is None else frozenset(line.split()[0] for line in text.splitlines() if line)

    def in_container(self) -> bool:
        """Whether this looks like the inside of a container."""
        if "KUBERNETES_SERVICE_HOST" in self.environment or self.exists("/.dockerenv") or self.exists("/run/.containerenv"):
            return True
        return re.search(r"kubepods|docker|containerd|libpod|lxc", self.text("/proc/self/cgroup") or "") is not None
