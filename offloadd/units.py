"""Sizes and roundings: the only place where a byte count meets its unit."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

#: Alignment of everything on a volume. 4 KiB satisfies O_DIRECT on every device with 512 B or 4 KiB logical blocks, and cuFile's own rule.
SECTOR_BYTES = 4096


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def format_bytes(size_bytes: float) -> str:
    """A byte count for people: `1.5 GiB`, `640 KiB`, `17 B`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
