"""Packed records of one block's move: what the front tells a mover about each block, and what comes back.

Plain NumPy records instead of objects: a request moves thousands of blocks, and a packed array crosses the socket as bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[Any]

#: One block of a job. `slab`, `slot`, `generation`, `nonce`, `namespace_*` name the slot on the volume; `arena_offset` the place in the arena;
#: `block_index` the place in the region. Fields that an operation does not use are zero. 128 bytes.
BLOCK_DTYPE = np.dtype(
    [
        ("key", "V32"),
        ("nonce", "V16"),
        ("arena_offset", "<u8"),
        ("sequence", "<u8"),
        ("payload_bytes", "<u8"),
        ("region", "<u4"),
        ("block_index", "<u4"),
        ("slab", "<u4"),
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("namespace_ordinal", "<u4"),
        ("namespace_epoch", "<u4"),
        ("checksum", "<u4"),
        #: Position of the block in its request.
        ("position", "<u4"),
        #: FLAG_* bits.
        ("flags", "<u4"),
        ("reserved", "V16"),
    ]
)
assert BLOCK_DTYPE.itemsize == 128

#: The block is kept: written into the slot header, so that it stays kept for `keep_grace_s` after a restart.
FLAG_KEEP = 1

#: Outcome of one block of a job. `reason` is a `Reason`; 0 means that the move succeeded. `checksum` is the payload's CRC32C. 16 bytes.
RESULT_DTYPE = np.dtype([("position", "<u4"), ("reason", "<u4"), ("checksum", "<u4"), ("reserved", "<u4")])
assert RESULT_DTYPE.itemsize == 16


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of a tier: `slab` and `slot` count from zero."""

    slab: int
    slot: int
