"""The round as a whole, with real processes: it ends whatever hangs, dies or raises."""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadd.config import load_config
from offloadd.doctor import Finding, Level, diagnose
from offloadd.doctor.registry import MACHINE_CHECKS, VOLUME_CHECKS
from offloadd.doctor.settings import settings_of
from offloadd.doctor.worker import load

from .tree import VOLUME, Tree

#: What a hanging check gets. Every worker must start and answer its first check within it, however slow the machine.
LIMIT_S = 6.0


def config_file(tree: Tree, *volumes: str) -> Path:
    path = tree.root.parent / "offloadd.toml"
    sections = [f'[[volume]]\npath = "{volume}"' for volume in volumes]
    path.write_text("\n".join(['[daemon]\nruntime_dir = "/run/offloadd"', *sections]))
    return path


def by_check(findings: tuple[Finding, ...], subject: str) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.subject == subject:
            found.setdefault(finding.check, []).append(finding)
    return found


def test_every_check_answers_and_findings_come_in_the_order_of_the_table(tree: Tree) -> None:
    tree.volume()
    diagnosis = diagnose(config_file(tree, VOLUME, "/mnt/none"), root=tree.root, environment={}, limit_s=60)
    assert list(dict.fromkeys((finding.subject, finding.check) for finding in diagnosis.findings)) == [
        *((check.group, check.name) for check in MACHINE_CHECKS),
        *((f"volume {VOLUME}", check.name) for check in VOLUME_CHECKS),
        *(("volume /mnt/none", check.name) for check in VOLUME_CHECKS),
    ]
    failed = [(finding.subject, finding.check) for finding in diagnosis.findings if finding.level is Level.FAIL]
    assert failed == [("volume /mnt/none", "file")]
    assert not diagnosis.is_healthy


def test_a_machine_without_failures_is_healthy(tree: Tree) -> None:
    tree.volume()
    assert diagnose(config_file(tree, VOLUME), root=tree.root, environment={}, limit_s=60).is_healthy


def test_settings_pass_to_the_worker_unchanged(tree: Tree) -> None:
    path = config_file(tree, VOLUME)
    assert load(str(path)) == settings_of(load_config(path), source=str(path))


def test_a_wrong_configuration_is_a_finding_and_the_machine_is_examined_all_the_same(tree: Tree) -> None:
    path = tree.root.parent / "wrong.toml"
    path.write_text("[arena]\narena_byte = 1\n")
    diagnosis = diagnose(path, root=tree.root, environment={}, limit_s=60)
    (config,) = by_check(diagnosis.findings, "daemon")["config"]
    assert (config.level, "did you mean arena.arena_bytes?" in config.cause) == (Level.FAIL, True)
    assert len({finding.check for finding in diagnosis.findings}) == len(MACHINE_CHECKS)


def test_what_a_check_raises_is_its_finding_and_the_next_check_runs(tree: Tree) -> None:
    tree.remove("/proc/meminfo")
    tree.directory("/proc/meminfo")
    found = tree.machine()
    finding = found.one("free")
    assert (finding.level, "IsADirectoryError" in finding.cause) == (Level.FAIL, True)
    assert found.one("sockets").level is Level.OK


def test_a_file_that_never_answers_costs_its_check_only(tree: Tree) -> None:
    # Opening a FIFO that nobody writes to waits for ever, as some files of a sick driver do.
    tree.remove("/proc/meminfo")
    os.mkfifo(tree.root / "proc/meminfo")
    diagnosis = diagnose(config_file(tree), root=tree.root, environment={}, limit_s=LIMIT_S)
    found = by_check(diagnosis.findings, "memory")
    assert (found["free"][0].level, found["free"][0].cause) == (Level.FAIL, f"no answer within {LIMIT_S:g} s: what it reads hangs")
    assert found["sockets"][0].level is Level.OK
    assert by_check(diagnosis.findings, "topology")["numa"][0].cause == "one node"


@contextlib.contextmanager
def opens_hang(path: Path) -> Iterator[None]:
    """Every open of the file waits, as on a dead volume: a write lease that its owner does not give back (Linux breaks it after 45 s)."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases on this file system: {error}")
        yield
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_a_hanging_volume_is_tried_once_and_the_rest_is_still_told(tree: Tree) -> None:
    tree.fabric_nvme("tcp", "connecting")
    tree.mount_volume("259:2")
    path = tree.volume()
    sound = tree.volume("/srv/volume1")
    with opens_hang(path):
        diagnosis = diagnose(config_file(tree, VOLUME, "/srv/volume1"), root=tree.root, environment={}, limit_s=LIMIT_S)
    found = by_check(diagnosis.findings, f"volume {VOLUME}")
    assert found["file"][0].level is Level.OK
    assert (found["superblock"][0].level, found["superblock"][0].cause) == (Level.FAIL, f"no answer within {LIMIT_S:g} s: the volume hangs")
    assert found["direct I/O"][0].cause == found["space"][0].cause == "not tried: the volume hangs"
    assert (found["paths"][0].level, found["paths"][0].cause.startswith("no path is live")) == (Level.FAIL, True)
    assert found["timeouts"][0].mend == "echo 5 > /sys/class/nvme/nvme1/fast_io_fail_tmo"
    assert sound.exists() and by_check(diagnosis.findings, "volume /srv/volume1")["superblock"][0].level is Level.OK


def test_a_worker_that_dies_is_a_finding_of_each_check(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.volume()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    diagnosis = diagnose(None, root=tree.root, environment={}, limit_s=60)
    assert len(diagnosis.findings) == len(MACHINE_CHECKS)
    assert {(finding.level, finding.cause) for finding in diagnosis.findings} == {(Level.FAIL, "the check failed: its process ended with status 1")}
