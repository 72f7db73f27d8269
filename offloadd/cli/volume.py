"""`offloadd volume`: formatting volumes and looking at them, without a daemon."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from offloadd.cli.tables import table
from offloadd.config import parse_size
from offloadd.errors import VolumeNotEmpty
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_summary import VolumeSummary, read_volume
from offloadd.units import GIB, format_bytes

app = typer.Typer(help="Volumes: files or block devices that keep blocks.", no_args_is_help=True)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None


@app.command("format")
def format_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or block device; a file that does not exist is made.")],
    size: Annotated[int | None, typer.Option(parser=_size, metavar="SIZE", help="Size, such as 100GiB. Default: that of what is there.")] = None,
    slab: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Size of one slab.", show_default="1GiB")] = GIB,
    namespaces: Annotated[int, typer.Option(metavar="COUNT", help="Namespaces that the volume can hold.")] = 1024,
    force_blocks: Annotated[bool, typer.Option("--force-blocks", help="Overwrite a volume that holds blocks: they are lost.")] = False,
) -> None:
    """Make PATH an empty volume. Takes seconds at any size."""
    try:
        geometry = format_volume(str(path), volume_bytes=size, slab_bytes=slab, namespace_count=namespaces, overwrite_blocks=force_blocks)
    except VolumeNotEmpty as error:
        raise VolumeNotEmpty(f"{error}; --force-blocks overwrites them") from error
    print(
        f"{path}: {format_bytes(geometry.volume_bytes)}, {geometry.slab_count} slabs of {format_bytes(geometry.slab_bytes)}, uuid {geometry.volume_uuid.hex()}"
    )


@app.command("show")
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or block device.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a volume, also while a daemon has it open."""
    summary = read_volume(str(path))
    if as_json:
        print(json.dumps(_values(summary), indent=2))
        return
    console = Console(highlight=False)
    geometry = summary.geometry
    created = datetime.fromtimestamp(summary.created_ns / 1e9, tz=UTC)
    facts = table("", "")
    facts.show_header = False
    for name, text in (
        ("path", summary.path),
        ("uuid", geometry.volume_uuid.hex()),
        ("formatted", created.isoformat(sep=" ", timespec="seconds")),
        ("in use", "by a running daemon" if summary.locked else "no"),
        ("opened", f"{summary.epoch} times"),
        ("size", f"{format_bytes(geometry.volume_bytes)} on {summary.file_system}"),
        (
            "slabs",
            f"{geometry.slab_count} of {format_bytes(geometry.slab_bytes)}: {summary.slabs_cut} cut ({summary.slabs_dirty} dirty), {summary.slabs_free} free",
        ),
        (
            "scratch",
            f"{format_bytes(geometry.scratch_bytes)} to measure with" if geometry.scratch_bytes else "none: formatted before there was any, or no room",
        ),
        ("namespaces", f"{summary.namespaces_live} live, {summary.namespaces_dropped} dropped, room for {geometry.namespace_count}"),
    ):
        facts.add_row(name, text)
    if summary.slabs_damaged or summary.namespaces_damaged:
        facts.add_row("damaged", f"{summary.slabs_damaged} slab headers, {summary.namespaces_damaged} namespaces")
    console.print(facts)
    if summary.slot_sizes:
        sizes = table("slot size", ">slabs", ">dirty", ">slots")
        for use in summary.slot_sizes:
            sizes.add_row(format_bytes(use.slot_bytes), str(use.slab_count), str(use.slabs_dirty), f"{use.slot_count:,}")
        console.print(sizes)


def _values(summary: VolumeSummary) -> dict[str, Any]:
    geometry = summary.geometry
    return {
        "path": summary.path,
        "uuid": geometry.volume_uuid.hex(),
        "volume_bytes": geometry.volume_bytes,
        "slab_bytes": geometry.slab_bytes,
        "slab_count": geometry.slab_count,
        "scratch_offset": geometry.scratch_offset,
        "scratch_bytes": geometry.scratch_bytes,
        "data_offset": geometry.data_offset,
        "namespace_count_max": geometry.namespace_count,
        "file_bytes": summary.file_bytes,
        "file_system": summary.file_system,
        "epoch": summary.epoch,
        "created_ns": summary.created_ns,
        "namespaces_live": summary.namespaces_live,
        "namespaces_dropped": summary.namespaces_dropped,
        "namespaces_damaged": summary.namespaces_damaged,
        "slabs_cut": summary.slabs_cut,
        "slabs_dirty": summary.slabs_dirty,
        "slabs_free": summary.slabs_free,
        "slabs_damaged": summary.slabs_damaged,
        "slot_sizes": [
            {"slot_bytes": use.slot_bytes, "slab_count": use.slab_count, "slabs_dirty": use.slabs_dirty, "slot_count": use.slot_count}
            for use in summary.slot_sizes
        ],
        "locked": summary.locked,
    }
