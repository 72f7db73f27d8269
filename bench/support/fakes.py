"""Blocks and keepers without bytes: catalogs filled as a recovery would, and slabs that are ready at once."""

from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.catalog import Catalog
from offloadd.catalog.index import KEY_DTYPE
from offloadd.catalog.pool import Pool
from offloadd.tiers.format import slot_bytes_for, slot_count_for
from offloadd.units import GIB

Keys = npt.NDArray[Any]

NONCE = bytes(range(16))
#: Keys that enter the catalog at once; as many as a keeper's message tells.
PART = 1024


def random_keys(count: int, seed: int) -> Keys:
    """Keys as good as digests."""
    return np.frombuffer(np.random.default_rng(seed).bytes(32 * count), dtype=KEY_DTYPE)


def add_volume(catalog: Catalog, *, slab_count: int, slab_bytes: int = GIB, open_slabs: int = 8) -> Pool:
    """One more volume, all slabs uncut."""
    ordinal = catalog.add_volume(slab_count=slab_count, slot_count_for=lambda slot_bytes: slot_count_for(slab_bytes, slot_bytes), open_slabs_max=open_slabs)
    return catalog.volumes[ordinal]


def grant(pool: Pool) -> bool:
    """What a keeper would do, at once: cut and open slabs as wished, close those beyond the limit. Whether there was anything to do."""
    granted = False
    while wishes := pool.take_wishes():
        granted = True
        for wish in wishes:
            pool.ready(wish.slab, NONCE)
    while (slab := pool.next_to_close()) is not None:
        granted = True
        pool.closing(slab)
        pool.closed(slab.index, clean=True)
    return granted


def recover_blocks(
    catalog: Catalog, volume: int, keys: Keys, *, payload_bytes: int, namespace: int, slab_bytes: int = GIB, dirty_slabs: int = 8, first_slab: int = 0
) -> int:
    """Enter blocks as a recovery does, slab after slab, the last `dirty_slabs` of them open; returns the next unused slab."""
    slot_bytes = slot_bytes_for(payload_bytes)
    slot_count = slot_count_for(slab_bytes, slot_bytes)
    pool = catalog.volumes[volume]
    slab_count = -(-len(keys) // slot_count)
    for number in range(slab_count):
        slab = first_slab + number
        mine = keys[number * slot_count : (number + 1) * slot_count]
        pool.adopt(slab, slot_bytes=slot_bytes, slot_count=slot_count, nonce=NONCE)
        for first in range(0, len(mine), PART):
            part = mine[first : first + PART]
            count = len(part)
            catalog.recover(
                volume,
                slab,
                np.arange(first, first + count, dtype=np.uint32),
                part,
                payload_bytes=np.full(count, payload_bytes),
                namespaces=np.full(count, namespace, dtype=np.int32),
                kept=np.zeros(count, dtype=np.bool_),
                keep_until_s=0.0,
            )
        pool.slabs[slab].generations[:] = 1
        pool.recovered(slab, dirty=slab_count - number <= dirty_slabs)
    return first_slab + slab_count
