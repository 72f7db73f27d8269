"""The doctor's round: load the configuration, run every check in time, gather what was found."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offloadd.config import Config
from offloadd.doctor.finding import Finding, Level, fail
from offloadd.doctor.messages import Checked, LoadConfig, RunChecks
from offloadd.doctor.process import WorkerEnded, WorkerProcess, WorkerSilent
from offloadd.doctor.registry import MACHINE_CHECKS, VOLUME_CHECKS, Check
from offloadd.doctor.settings import Settings, settings_of
from offloadd.doctor.subject import Machine, Volume

LIMIT_S_DEFAULT = 10.0
#: Subjects at a time. Each is a process; most of them wait for a disk or for nothing.
_AT_A_TIME = 8
#: What checks read of the environment.
_VARIABLES = ("CUFILE_ENV_PATH_JSON", "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH", "KUBERNETES_SERVICE_HOST")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order of the table: the machine's groups, then the volumes in the order of the configuration."""

    findings: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        """Findings of one level."""
        return sum(finding.level is level for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing FAILs."""
        return self.count(Level.FAIL) == 0


def diagnose(config_path: Path | None, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None, limit_s: float = LIMIT_S_DEFAULT) -> Diagnosis:
    """Examine the machine under `root` and the volumes of a configuration. Always ends: a check gets `limit_s` seconds, then its process is left behind."""
    chosen = {name: value for name, value in (os.environ if environment is None else environment).items() if name in _VARIABLES}
    settings = _load(config_path, limit_s)
    tasks = [RunChecks(root=str(root), environment=chosen, settings=settings, volume_index=index) for index in (None, *range(len(settings.volumes)))]
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        rounds = list(pool.map(lambda task: _examine(task, limit_s), tasks))
    return Diagnosis(tuple(finding for findings in rounds for finding in findings))


def _load(config_path: Path | None, limit_s: float) -> Settings:
    # In a process as well: checking that volumes differ follows their paths, and a dead network file system does not answer that.
    task = LoadConfig(None if config_path is None else str(config_path.absolute()))
    try:
        with WorkerProcess(task, limit_s) as worker:
            return msgspec.json.decode(worker.line(), type=Settings)
    except (WorkerSilent, WorkerEnded) as error:
        return settings_of(Config(), source=task.config_path or "", error=f"the configuration can't be loaded: {error}")


def _examine(task: RunChecks, limit_s: float) -> list[Finding]:
    """All checks of one subject, with a new process after each that hangs or dies."""
    checks: tuple[Check[Machine] | Check[Volume], ...] = MACHINE_CHECKS if task.volume_index is None else VOLUME_CHECKS
    path = "" if task.volume_index is None else task.settings.volumes[task.volume_index].path
    found: list[Finding] = []
    first, hangs = 0, False
    while first < len(checks):
        try:
            with WorkerProcess(msgspec.structs.replace(task, first=first, hangs=hangs), limit_s) as worker:
                while first < len(checks):
                    answer = msgspec.json.decode(worker.line(), type=Checked)
                    found += [_named(finding, checks[first], path) for finding in answer.findings]
                    first += 1
        except WorkerSilent as error:
            cause = f"{error}: {checks[first].asks or 'what it reads'} hangs"
            found.append(_named(fail(cause, "dmesg | tail; ps -eo pid,stat,wchan:32,cmd | grep ' D'"), checks[first], path))
            hangs = hangs or bool(checks[first].asks)
            first += 1
        except WorkerEnded as error:
            found.append(_named(fail(f"the check failed: {error}"), checks[first], path))
            first += 1
    return found


def _named(finding: Finding, check: Check[Machine] | Check[Volume], path: str) -> Finding:
    return msgspec.structs.replace(finding, subject=f"{check.group} {path}".strip(), check=check.name)
