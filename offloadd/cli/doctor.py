"""`offloadd doctor`: what is right and wrong with this machine, and what mends it."""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from offloadd import __version__
from offloadd.cli.tables import plain, table
from offloadd.doctor import Diagnosis, Finding, Level, diagnose

_STYLE = {Level.OK: "green", Level.WARN: "bold yellow", Level.FAIL: "bold red", Level.NOT_APPLICABLE: "dim"}

#: Columns from which on a command has a column of its own.
_WIDE = 120


def show_diagnosis(
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file; without one the defaults hold.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    limit_s: Annotated[float, typer.Option("--limit", min=0.1, max=600, metavar="SECONDS", help="Time that one check gets.")] = 10.0,
) -> None:
    """Check this machine and the configured volumes. Changes nothing. Exit status 1: something FAILs."""
    diagnosis = diagnose(config, limit_s=limit_s)
    if as_json:
        print(json.dumps(values_of(diagnosis), indent=2))
    else:
        render(diagnosis, Console(highlight=False))
    raise typer.Exit(0 if diagnosis.is_healthy else 1)


def values_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain values, in the shape of the JSON."""
    return {
        "version": __version__,
        "healthy": diagnosis.is_healthy,
        "counts": {level.value: diagnosis.count(level) for level in Level},
        "findings": [
            {"subject": finding.subject, "check": finding.check, "level": finding.level.value, "cause": finding.cause, "mend": finding.mend}
            for finding in diagnosis.findings
        ],
    }


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis for people: one table a subject."""
    for subject, group in groupby(diagnosis.findings, key=lambda finding: finding.subject):
        _render_subject(subject, list(group), console)
    counts = [f"{diagnosis.count(level)} {level.value}" for level in Level if diagnosis.count(level)]
    console.print(Text(", ".join(counts), style="bold"))


def _render_subject(subject: str, findings: list[Finding], console: Console) -> None:
    # rich's own table titles wrap at the table's width, and a volume's path may be longer than that.
    console.print(plain(subject), style="bold")
    causes = {finding.cause for finding in findings}
    if len(causes) == 1 and findings[0].level is Level.NOT_APPLICABLE:
        console.print(Text.assemble(_level(Level.NOT_APPLICABLE), "  ", plain(findings[0].cause)), "", sep="\n")
        return
    # In a column of its own on a narrow terminal, nearly every command would be broken in two.
    beside = console.width >= _WIDE and any(finding.mend for finding in findings)
    shown = table("", "check", "cause", *(["mend"] if beside else []))
    shown.columns[1].no_wrap = True
    if not beside:
        shown.columns[2].header = "cause, and what mends it"
    for finding in findings:
        cause, mend = plain(finding.cause), plain(finding.mend)
        mend.stylize("cyan")
        if beside:
            shown.add_row(_level(finding.level), plain(finding.check), cause, mend)
        else:
            shown.add_row(_level(finding.level), plain(finding.check), Text("\n").join([cause, mend]) if finding.mend else cause)
    console.print(shown)
    console.print()


def _level(level: Level) -> Text:
    return Text(level.value, style=_STYLE[level])
