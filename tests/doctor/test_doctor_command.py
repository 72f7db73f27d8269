"""The command: its table, its JSON and its exit status."""

import json
import os
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from offloadd.cli.doctor import render, show_diagnosis, values_of
from offloadd.doctor import Diagnosis, Finding, Level
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB

app = typer.Typer()
app.command()(show_diagnosis)

COMMAND = "echo 5 > /sys/class/nvme/nvme1/fast_io_fail_tmo"
FINDINGS = (
    Finding(Level.OK, "23.0 GiB available; needed: 1.5 GiB (arena 1 GiB, staging 96 MiB, index up to 376 MiB)", "", "memory", "free"),
    Finding(Level.WARN, "nvme1: fast_io_fail_tmo is off: I/O blocks 600 s when the target is gone", COMMAND, "volume /mnt/kv/volume0", "timeouts"),
    Finding(Level.FAIL, "no path is live, I/O stalls: nvme1 tcp connecting", "dmesg | grep nvme1", "volume /mnt/kv/volume0", "paths"),
    Finding(Level.NOT_APPLICABLE, "no NVIDIA driver here", "", "gds", "nvidia-fs"),
    Finding(Level.NOT_APPLICABLE, "no NVIDIA driver here", "", "gds", "p2pdma"),
)


def shown(diagnosis: Diagnosis, width: int) -> str:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        console = Console(width=width, record=True, file=nowhere, color_system=None, highlight=False)
        render(diagnosis, console)
        return console.export_text()


def config_of(tmp_path: Path, volume: Path) -> Path:
    path = tmp_path / "offloadd.toml"
    path.write_text(
        f'[daemon]\nruntime_dir = "{tmp_path}/run"\n[arena]\narena_bytes = "64MiB"\n[limits]\nindex_bytes_max = "1MiB"\n[[volume]]\npath = "{volume}"\n'
    )
    return path


@pytest.mark.parametrize("width", [80, 132])
def test_the_table_keeps_within_the_terminal_and_commands_whole(width: int) -> None:
    text = shown(Diagnosis(FINDINGS), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert COMMAND in text
    assert "1 OK, 1 WARN, 1 FAIL, 2 N/A" in text.splitlines()[-1]
    assert text.count("no NVIDIA driver here") == 1


def test_text_from_the_machine_does_not_reach_the_terminal_as_control_characters() -> None:
    bad = Finding(Level.FAIL, "\x1b[2Jgone [red]", "rm \x07", "volume /mnt/\x1b]0;x", "file")
    text = shown(Diagnosis((bad,)), 80)
    assert "\x1b" not in text and "\x07" not in text
    assert "[red]" in text


def test_json_has_every_finding_and_the_counts() -> None:
    values = json.loads(json.dumps(values_of(Diagnosis(FINDINGS))))
    assert values["healthy"] is False
    assert values["counts"] == {"OK": 1, "WARN": 1, "FAIL": 1, "N/A": 2}
    assert values["findings"][1] == {
        "subject": "volume /mnt/kv/volume0",
        "check": "timeouts",
        "level": "WARN",
        "cause": "nvme1: fast_io_fail_tmo is off: I/O blocks 600 s when the target is gone",
        "mend": COMMAND,
    }


def test_the_exit_status_is_1_only_if_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for findings, status in ((FINDINGS, 1), ([finding for finding in FINDINGS if finding.level is not Level.FAIL], 0)):
        monkeypatch.setattr("offloadd.cli.doctor.diagnose", lambda *_, found=tuple(findings), **__: Diagnosis(found))
        assert CliRunner().invoke(app, []).exit_code == status


def test_this_machine_is_examined_with_a_volume_that_is_missing_and_then_there(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    config = config_of(tmp_path, volume)
    levels = []
    for _ in range(2):
        result = CliRunner().invoke(app, ["--config", str(config), "--json", "--limit", "60"])
        values = json.loads(result.stdout)
        assert result.exit_code == (0 if values["healthy"] else 1)
        levels.append({finding["check"]: finding["level"] for finding in values["findings"] if finding["subject"] == f"volume {volume}"})
        format_volume(str(volume), volume_bytes=8 * MIB, slab_bytes=MIB, namespace_count=16)
    assert levels[0]["file"] == "FAIL"
    assert (levels[1]["file"], levels[1]["superblock"], "FAIL" in levels[1].values()) == ("OK", "OK", False)
