"""Can the tests fail? Each mutant of mutants.toml takes one protection away; the tests that it names must notice.

    python -m tests.mutants [NAME...]        all, or some; exit status 1 if one survives

Everything happens in a copy of the working tree. First the named tests must pass as they are. A mutant is killed when one of its tests fails; when they can't
even be collected the mutant is broken, which counts as surviving.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.support.machine import machine_record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
LIST = Path(__file__).with_name("mutants.toml")
#: A mutant that makes its test hang is killed by pytest's own time-out long before.
TIMEOUT_S = 900

#: Exit statuses of pytest.
PASSED, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `file`, `find` (which stands there exactly once) becomes `replace`; `tests` are arguments for pytest, `promise` says what is no longer kept."""

    name: str
    promise: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def apply(self, folder: Path) -> None:
        """Change the copy in `folder`. Raises ValueError as `changed`."""
        path = folder / self.file
        path.write_text(self.changed(path.read_text()))

    def changed(self, text: str) -> str:
        """The file's text without the protection. Raises ValueError when the place is not there, or not the only one."""
        if text.count(self.find) != 1:
            raise ValueError(f"mutant {self.name}: {self.file} has {text.count(self.find)} places that read {self.find!r}; exactly 1 is needed")
        return text.replace(self.find, self.replace)

    def undo(self, folder: Path) -> None:
        """The original again."""
        shutil.copy2(ROOT / self.file, folder / self.file)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant. `by`: the first test that failed."""

    mutant: Mutant
    killed: bool
    by: str
    seconds: float


def load_mutants() -> list[Mutant]:
    """All of the list. Raises ValueError if two have one name."""
    mutants = [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two mutants have the name {sorted(twice)}")
    return mutants


def copy_tree(folder: Path) -> None:
    """The working tree's files, without what git ignores, but with what was built."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
    built = [path.relative_to(ROOT) for path in (ROOT / "offloadd").rglob("_moves*.so")]
    for path in [*map(Path, filter(None, os.fsdecode(listed).split("\0"))), *built]:
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)


def build(folder: Path) -> None:
    """The C library of the copy."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"], cwd=folder, capture_output=True, check=True)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest in the copy, stopped at the first failure, and that one's name or the last line."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = (done.stdout + done.stderr).splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, failed[0].split(" ")[1] if failed else lines[-1]


def judge(folder: Path, mutant: Mutant) -> Verdict:
    """Apply it, run its tests, undo it."""
    begin = time.monotonic()
    mutant.apply(folder)
    in_c = mutant.file.endswith(".c")
    try:
        if in_c:
            build(folder)
        status, by = run_tests(folder, mutant.tests)
    except subprocess.TimeoutExpired:
        status, by = FAILED, f"no end within {TIMEOUT_S} s"
    finally:
        mutant.undo(folder)
        if in_c:
            build(folder)
    return Verdict(mutant, status == FAILED, by, time.monotonic() - begin)


def write_record(verdicts: Sequence[Verdict]) -> Path:
    """As JSON, beside the benchmarks' results."""
    machine = machine_record(ROOT)
    rows = [
        {"mutant": one.mutant.name, "promise": one.mutant.promise, "killed": one.killed, "by": one.by, "seconds": round(one.seconds, 1)} for one in verdicts
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"mutants-{str(machine['date'])[:10]}.json"
    path.write_text(json.dumps({"machine": machine, "mutants": rows}, indent=2) + "\n")
    return path


def main() -> int:
    """Judge the mutants and tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Take protections away, one after the other, and see the tests fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    chosen = parser.parse_args().names
    mutants = load_mutants()
    if unknown := set(chosen) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}; there are {', '.join(mutant.name for mutant in mutants)}")
    mutants = [mutant for mutant in mutants if not chosen or mutant.name in chosen]
    console = Console()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="offloadd-mutants-") as name:
        folder = Path(name)
        copy_tree(folder)
        console.print(f"{len(mutants)} mutants; first their tests without them")
        status, last = run_tests(folder, sorted({test for mutant in mutants for test in mutant.tests}))
        if status != PASSED:
            console.print(f"the tests do not pass as they are: {last}", style="red")
            return 2
        for mutant in mutants:
            verdict = judge(folder, mutant)
            verdicts.append(verdict)
            outcome = "[green]killed[/]" if verdict.killed else "[red]survived[/]"
            console.print(f"{outcome}  {mutant.name}  {verdict.seconds:.0f} s  [dim]{verdict.by}[/]", highlight=False, soft_wrap=True)
    table = Table("mutant", "without it", "", title=f"{sum(one.killed for one in verdicts)} of {len(verdicts)} mutants killed")
    for one in verdicts:
        table.add_row(one.mutant.name, one.mutant.promise, "killed" if one.killed else "[red]SURVIVED[/]")
    console.print(table)
    if not chosen:
        console.print(f"written to {write_record(verdicts).relative_to(ROOT)}")
    return 0 if all(one.killed for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
