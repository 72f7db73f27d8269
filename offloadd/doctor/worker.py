"""The process that runs checks (`python -m offloadd.doctor.worker`), so that one that hangs hangs alone.

A process, not a thread: a thread that waits for a dead volume is in D state and keeps its whole process from ending, whatever kills it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from offloadd.config import Config, load_config
from offloadd.doctor.finding import Finding, fail, not_applicable
from offloadd.doctor.messages import Checked, LoadConfig, RunChecks, Task
from offloadd.doctor.registry import MACHINE_CHECKS, VOLUME_CHECKS, Check, Subject
from offloadd.doctor.settings import Settings, settings_of
from offloadd.doctor.subject import Machine, Volume
from offloadd.errors import ConfigError
from offloadd.machine.system import System


def load(config_path: str | None) -> Settings:
    """The settings of a file, or the defaults with the reason why the file can't be used."""
    source = config_path or ""
    try:
        return settings_of(load_config(Path(config_path) if config_path is not None else None), source=source)
    except ConfigError as error:
        return settings_of(Config(), source=source, error=str(error))


def run_checks(task: RunChecks) -> Iterator[Checked]:
    """The findings of each check in turn; what a check raises becomes a finding."""
    system = System(root=Path(task.root), environment=task.environment)
    if task.volume_index is None:
        yield from _run_all(MACHINE_CHECKS, system, Machine(task.settings), task)
    else:
        yield from _run_all(VOLUME_CHECKS, system, Volume(task.settings, task.settings.volumes[task.volume_index], follow_links=not task.hangs), task)


def _run_all(checks: Sequence[Check[Subject]], system: System, subject: Subject, task: RunChecks) -> Iterator[Checked]:
    for check in checks[task.first :]:
        if task.hangs and check.asks:
            yield Checked([not_applicable(f"not tried: {check.asks} hangs")])
        else:
            yield Checked(_run(check, system, subject))


def _run(check: Check[Subject], system: System, subject: Subject) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings.extend(check.function(system, subject))
    except Exception as error:  # A check must not take the others with it, whatever a strange machine makes it do.
        findings.append(fail(f"the check itself failed: {type(error).__name__}: {error}"))
    return findings


def main(source: BinaryIO, target: BinaryIO) -> None:
    """Serve the one task that `source` holds."""
    task = msgspec.json.decode(source.read(), type=Task)
    answers: Iterator[Settings | Checked] = iter([load(task.config_path)]) if isinstance(task, LoadConfig) else run_checks(task)
    for answer in answers:
        target.write(msgspec.json.encode(answer) + b"\n")
        target.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
