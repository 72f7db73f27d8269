"""How much one launch does: a list of payloads cut so that no launch holds the SMs for long. Pure arithmetic."""

from dataclasses import dataclass
from itertools import pairwise

#: A kernel holds its SMs until it ends, whatever waits, and kernels of two processes take turns without MPS: so long may a decode step be delayed.
LAUNCH_S_MAX = 1e-3
#: Largest y of a grid, on every GPU so far.
GRID_Y_MAX = 65535
#: Largest x.
GRID_X_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles `first_tile` and following of payloads `first_payload` and following: a grid of tile_count × payload_count CTAs."""

    first_payload: int
    payload_count: int
    first_tile: int
    tile_count: int


def plan_launches(payload_count: int, payload_tiles: int, tile_bytes: int, *, bytes_per_s: float, launch_s_max: float = LAUNCH_S_MAX) -> list[Launch]:
    """Launches that together cover each of `payload_tiles` tiles of each payload once, in order.

    None takes longer than `launch_s_max` at `bytes_per_s`, unless a single tile of `tile_bytes` does. The launches are as few as that allows, but whole
    payloads stay together where they fit, and tiles and payloads are spread evenly: a small rest at the end would leave SMs idle.
    """
    if payload_count < 1 or payload_tiles < 1:
        return []
    tiles_max = max(1, min(GRID_X_MAX, int(bytes_per_s * launch_s_max / tile_bytes)))
    if payload_tiles <= tiles_max:
        return [Launch(first, count, 0, payload_tiles) for first, count in _evenly(payload_count, min(tiles_max // payload_tiles, GRID_Y_MAX))]
    ranges = _evenly(payload_tiles, tiles_max)
    return [Launch(payload, 1, first, count) for payload in range(payload_count) for first, count in ranges]


def _evenly(count: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of as few ranges as possible with at most `most` each, whose lengths differ by 1 at most."""
    parts = -(-count // most)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [(begin, end - begin) for begin, end in pairwise(bounds)]
