"""`offloadd status`: what a running daemon holds and does."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from offloadd.cli.tables import format_duration, plain, table
from offloadd.errors import Unavailable
from offloadd.model import enums
from offloadd.model.runtime import runtime_dir_default
from offloadd.units import format_bytes

#: Exit status when there is no daemon, so that scripts can tell this from a failure.
EXIT_NO_DAEMON = 3

#: Colors of the words that a state starts with.
_STATE_STYLE = {"SERVING": "bold green", "serving": "green", "failed": "bold red", "DRAINING": "bold yellow"}


def show_status(
    runtime_dir: Annotated[Path | None, typer.Option("--runtime-dir", metavar="DIR", help="Runtime directory of the daemon.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the daemon holds and does. Exit status 3: no daemon is running."""
    from offloadd.client import AdminClient

    directory = runtime_dir if runtime_dir is not None else runtime_dir_default()
    try:
        status = AdminClient(directory).status()
    except Unavailable:
        print(f"no daemon is running at {directory}", file=sys.stderr)
        raise typer.Exit(EXIT_NO_DAEMON) from None
    if as_json:
        print(json.dumps(values_of(status), indent=2))
    else:
        render(values_of(status), Console(highlight=False))


def values_of(status: Any) -> dict[str, Any]:
    """The daemon's answer (a StatusResponse) as plain values, in the shape of the JSON: counts as numbers, times in seconds, enums by name."""
    return {
        "version": status.version,
        "state": status.state,
        "pid": status.pid,
        "uptime_s": status.uptime.ToNanoseconds() / 1e9,
        "block_count": status.block_count,
        "block_count_max": status.block_count_max,
        "held_count": status.held_count,
        "load": _fields(status.load, *(field.name for field in status.load.DESCRIPTOR.fields)),
        "arena": _fields(status.arena, "arena_bytes", "used_bytes", "block_count", "pages")
        | {"nodes": [_fields(node, "node", "arena_bytes", "used_bytes") for node in status.arena.nodes]},
        "volumes": [
            _fields(
                volume,
                "path",
                "uuid",
                "state",
                "volume_bytes",
                "used_bytes",
                "block_count",
                "slab_count",
                "cut_count",
                "open_count",
                "file_system",
                "direct_io",
                "scan_header_bytes",
                "reads_breaker",
                "writes_breaker",
                "late_count",
            )
            | {"recovery_s": volume.recovery.ToNanoseconds() / 1e9}
            for volume in status.volumes
        ],
        "sessions": [
            _fields(session, "name", "instance", "tenant", "pid", "region_count", "mapped_bytes", "request_count", "bytes_in_flight")
            for session in status.sessions
        ],
        "workers": [_fields(worker, "name", "pid", "restart_count", "placement", "copies_by") for worker in status.workers],
        "gpus": [_fields(gpu, "device", "uuid", "name", "pci_bus_id", "compute_mode", "uses_mps", "context_bytes", "note") for gpu in status.gpus],
        "paths": [
            {"tier": _name(enums.Tier, path.tier), "path": _name(enums.Path, path.path)}
            | _fields(path, "device", "available", "note", "restore_bytes_per_s", "evict_bytes_per_s")
            | {"volumes": [_fields(rates, *(field.name for field in rates.DESCRIPTOR.fields)) for rates in path.volumes]}
            for path in status.paths
        ],
        "counters": {counter.name: counter.value for counter in status.counters},
    }


def render(status: dict[str, Any], console: Console) -> None:
    """Print `values_of` a status for people."""
    console.print(
        Text.assemble(plain(f"offloadd {status['version']}  "), _state(status["state"]), f"  up {format_duration(status['uptime_s'])}  pid {status['pid']}")
    )
    console.print(f"{status['block_count']:,} of {status['block_count_max']:,} blocks, {status['held_count']:,} of them kept or leased")
    _render_load(status["load"], console)
    _render_tiers(status, console)
    _render_volumes(status["volumes"], console)
    if status["sessions"]:
        sessions = table("session", "instance", "tenant", ">pid", ">regions", ">mapped", ">requests", ">in flight", title="Sessions")
        for session in status["sessions"]:
            sessions.add_row(
                plain(session["name"]),
                plain(session["instance"]),
                plain(session["tenant"]),
                str(session["pid"]),
                str(session["region_count"]),
                format_bytes(session["mapped_bytes"]),
                str(session["request_count"]),
                format_bytes(session["bytes_in_flight"]),
            )
        console.print(sessions)
        console.print()
    workers = table("worker", ">pid", ">restarts", "", title="Workers")
    for worker in status["workers"]:
        workers.add_row(
            plain(worker["name"]),
            str(worker["pid"] or "restarting"),
            str(worker["restart_count"]),
            plain(worker["placement"] or (worker["copies_by"] and f"copies by {worker['copies_by']}")),
        )
    console.print(workers)
    console.print()
    _render_gpus(status["gpus"], console)
    paths = table("tier", "path", "device", ">restore", ">evict", "note", title="Paths")
    for path in status["paths"]:
        style = "" if path["available"] else "dim"
        note = path["note"] or ("" if path["available"] else "not available")
        paths.add_row(
            path["tier"], path["path"], plain(path["device"]), _rate(path["restore_bytes_per_s"]), _rate(path["evict_bytes_per_s"]), plain(note), style=style
        )
    console.print(paths)
    console.print()
    _render_rates(status["paths"], console)
    if status["counters"]:
        counters = table("counter", ">value", title="Since the start")
        for name, value in sorted(status["counters"].items()):
            counters.add_row(plain(name.removeprefix("offloadd_")), format_bytes(value) if name.startswith("offloadd_bytes") else f"{value:,}")
        console.print(counters)
        console.print()


def _render_load(load: dict[str, Any], console: Console) -> None:
    in_flight = f"{load['request_count']:,} of {load['request_count_max']:,} requests in flight"
    size = f"{format_bytes(load['bytes_in_flight'])} of {format_bytes(load['bytes_in_flight_max'])}"
    console.print(f"{in_flight} with {load['block_count']:,} of {load['block_count_max']:,} blocks and {size}; {load['refused_count']:,} refused")
    console.print(f"{load['session_count']:,} of {load['session_count_max']:,} sessions\n")


def _render_tiers(status: dict[str, Any], console: Console) -> None:
    tiers = table("tier", ">blocks", ">used", ">size", ">full", "", title="Tiers")
    arena, volumes = status["arena"], status["volumes"]
    if arena["arena_bytes"]:
        tiers.add_row("arena", *_fill(arena["block_count"], arena["used_bytes"], arena["arena_bytes"]), plain(arena["pages"]))
        for node in arena["nodes"]:
            _, *fill = _fill(0, node["used_bytes"], node["arena_bytes"])
            tiers.add_row(f"  NUMA node {node['node']}", "", *fill, "")
    if volumes:
        count, used, size = (sum(volume[name] for volume in volumes) for name in ("block_count", "used_bytes", "volume_bytes"))
        serving = sum(volume["state"] == "serving" and not volume["reads_breaker"].startswith("open") for volume in volumes)
        tiers.add_row("volumes", *_fill(count, used, size), f"{serving} of {len(volumes)} serving")
    console.print(tiers)
    console.print()


def _render_volumes(volumes: list[dict[str, Any]], console: Console) -> None:
    if not volumes:
        return
    shown = table("volume", "state", ">blocks", ">used", ">size", ">slabs cut", title="Volumes")
    notes = []
    for volume in volumes:
        count, used, size, _ = _fill(volume["block_count"], volume["used_bytes"], volume["volume_bytes"])
        # What a state says after its colon, an error as a rule, is too long for a column.
        state, _, detail = volume["state"].partition(": ")
        shown.add_row(plain(volume["path"]), _state(state), count, used, size, f"{volume['cut_count']}/{volume['slab_count']}")
        notes += [f"{volume['path']}: {state}: {detail}"] if detail else []
        notes += [f"{volume['path']}: reads {volume['reads_breaker']}"] if volume["reads_breaker"] not in ("", "closed") else []
        notes += [f"{volume['path']}: writes {volume['writes_breaker']}"] if volume["writes_breaker"] not in ("", "closed") else []
        notes += [f"{volume['path']}: {volume['late_count']} jobs that were sent to it are late"] if volume["late_count"] else []
        notes += [f"{volume['path']}: no direct I/O: {volume['direct_io']}"] if volume["direct_io"] not in ("", "yes") else []
    console.print(shown)
    for note in notes:
        console.print(plain(note))
    console.print()


def _render_gpus(gpus: list[dict[str, Any]], console: Console) -> None:
    if not gpus:
        return
    shown = table("gpu", "model", "pci", "compute mode", "mps", ">context", title="GPUs")
    for gpu in gpus:
        mps = "" if gpu["note"] else "yes" if gpu["uses_mps"] else "no"
        context = format_bytes(gpu["context_bytes"]) if gpu["context_bytes"] else "-"
        shown.add_row(plain(gpu["device"]), plain(gpu["name"] or "can't be used"), plain(gpu["pci_bus_id"]), plain(gpu["compute_mode"]), mps, context)
    console.print(shown)
    for gpu in gpus:
        # As with volumes, reasons are too long for a column.
        if gpu["note"]:
            console.print(plain(f"{gpu['device']}: {gpu['note']}"))
    console.print()


def _fill(block_count: int, used_bytes: int, size_bytes: int) -> tuple[str, str, str, str]:
    full = f"{100 * used_bytes / size_bytes:.0f} %" if size_bytes else ""
    return f"{block_count:,}", format_bytes(used_bytes), format_bytes(size_bytes), full


#: Columns of the rates, and the field that each shows.
_RATE_COLUMNS = {">restore": "restore", ">restore small": "restore_small", ">evict": "evict", ">evict small": "evict_small"}


def _render_rates(paths: list[dict[str, Any]], console: Console) -> None:
    rows = [(path, rates) for path in paths for rates in path["volumes"]]
    if not rows:
        return
    shown = table("device", "volume", "path", *_RATE_COLUMNS, title="Measured between GPUs and volumes; * is what auto takes")
    notes = []
    for path, rates in rows:
        values = [_rate(rates[f"{name}_bytes_per_s"]) + ("*" if rates[f"{name}_auto"] else "") for name in _RATE_COLUMNS.values()]
        shown.add_row(plain(path["device"]), plain(rates["volume"]), path["path"], *values, style="" if rates["available"] else "dim")
        notes += [f"{path['device']}, {rates['volume']}: {rates['note']}"] if rates["note"] else []
    console.print(shown)
    for note in dict.fromkeys(notes):
        console.print(plain(note))
    console.print()


def _rate(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s else "-"


def _state(text: str) -> Text:
    shown = plain(text)
    shown.stylize(_STATE_STYLE.get(text.split(":")[0], "yellow"))
    return shown


def _fields(message: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _name(kind: type[enums.Tier] | type[enums.Path], number: int) -> str:
    # A newer daemon may know more than this command.
    return kind(number).name.lower() if number in set(kind) else str(number)
