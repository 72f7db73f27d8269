"""The `offloadd` command: what it can do, and how its errors look."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from offloadd import __version__
from offloadd.cli import doctor, drain, status, volume
from offloadd.config import load_config
from offloadd.config.needs import memory_needs
from offloadd.errors import OffloaddError
from offloadd.units import format_bytes

# Pretty exceptions would show local variables, and help would differ between a terminal and a pipe.
app = typer.Typer(
    help="Keeps KV cache blocks of inference engines in host memory and on volumes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Configuration files.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(volume.app, name="volume")
app.command("status")(status.show_status)
app.command("drain")(drain.drain)
app.command("doctor")(doctor.show_diagnosis)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"offloadd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file; without one the defaults hold.")] = None,
) -> None:
    """Run the daemon until SIGTERM."""
    loaded = load_config(config)
    from offloadd.daemon.app import run as run_daemon
    from offloadd.daemon.logs import configure

    configure(loaded.daemon.log_level, loaded.daemon.log_format)
    raise typer.Exit(run_daemon(loaded))


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=16, max=1 << 17, help="Tokens in the sequence; 128 KiB of KV each.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Whole-sequence restores per tier.")] = 15,
) -> None:
    """Show a daemon and an engine's memory at work on this machine; leaves nothing but its log in ./.demo."""
    from offloadd.cli.demo import run as run_demo

    raise typer.Exit(run_demo(tokens, rounds))


@config_app.command("check")
def check_config(file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file.")]) -> None:
    """Say whether a configuration file is right, and how much memory the daemon may take with it."""
    config = load_config(file)
    count = len(config.volume)
    print(f"{file} is right: an arena of {format_bytes(config.arena.arena_bytes)}, {count} {'volume' if count == 1 else 'volumes'}")
    needs = memory_needs(config)
    print(f"memory: {format_bytes(sum(need.bytes for need in needs))} at most")
    for need in needs:
        print(f"  {format_bytes(need.bytes):>10}  {need.what}")


def run() -> None:
    """Entry point. An error made on purpose, or by the system, is one line on stderr and exit status 1; a wrong usage is 2."""
    try:
        app(prog_name="offloadd")
    except OffloaddError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))


def _fail(message: str) -> NoReturn:
    print(f"offloadd: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
