"""Byte counts as people write them: `8 GiB`, `1.5 GiB`, `65536`."""

import os
import re
from fractions import Fraction

from offloadd.units import GIB, KIB, MIB, SECTOR_BYTES, align_up

_UNIT_BYTES = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB * KIB}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)", re.ASCII)

#: Largest byte count that a file offset (signed, 64 bits) can reach.
SIZE_BYTES_MAX = (1 << 63) - 1


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`: a whole number, or a number with one of B, KiB, MiB, GiB, TiB. Raises ValueError that says what is wrong.

    Decimal units (GB) are refused instead of guessed: a tier 7 % smaller than meant is found out late.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError('a size is needed, such as "8 GiB" or 65536')
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError('a size is needed, such as "8 GiB" or 65536')
    number, unit = match.groups()
    if unit not in _UNIT_BYTES:
        raise ValueError(f'its unit "{unit}" is not one of B, KiB, MiB, GiB, TiB')
    size = Fraction(number) * _UNIT_BYTES[unit]
    if size.denominator != 1:
        raise ValueError("it is not a whole number of bytes")
    if size > SIZE_BYTES_MAX:
        raise ValueError(f"at most {SIZE_BYTES_MAX} bytes are possible")
    return int(size)


def physical_memory_bytes() -> int:
    """Memory of this machine; of the control group nothing is known here."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_arena_bytes(slab_bytes: int, memory_bytes: int) -> int:
    """The smaller of 1 GiB and an eighth of the memory, rounded down to whole slabs; at least one slab."""
    assert slab_bytes == align_up(slab_bytes, SECTOR_BYTES)
    return max(min(GIB, memory_bytes // 8) // slab_bytes, 1) * slab_bytes


def default_index_bytes(memory_bytes: int) -> int:
    """The smaller of 4 GiB (50 million blocks) and 1/64 of the memory, rounded down to whole MiB; at least 64 MiB. A sixth of it is touched at start."""
    return max(min(4 * GIB, memory_bytes // 64), 64 * MIB) // MIB * MIB


def default_lane_threads() -> int:
    """Threads of the arena's lane: 2 to 4. More than cores only fight for the interpreter: with 4 on 2 cores verified restores lost a tenth."""
    return max(2, min(4, len(os.sched_getaffinity(0))))
