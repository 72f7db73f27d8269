"""Uses a small catalog once, so that the event loop does not pay for NumPy's first calls: 10 to 27 ms in the middle of the first evict."""

import numpy as np

from offloadd.catalog.catalog import Catalog
from offloadd.catalog.index import KEY_BYTES, keys_array

SLOT_BYTES = 4096
SLAB_SLOTS = 8
HOLDER = 1


def warm_up() -> None:
    """Store, restore, reclaim, hold, expire and drop a few blocks in tiers that go with the call."""
    catalog = Catalog(capacity=64)
    catalog.add_arena(slab_count=2, slot_count_for=lambda slot_bytes: SLAB_SLOTS)
    volume = catalog.add_volume(slab_count=2, slot_count_for=lambda slot_bytes: SLAB_SLOTS, open_slabs_max=2)
    for turn in range(6):
        keys = keys_array([bytes([turn * SLAB_SLOTS + number]) * KEY_BYTES for number in range(SLAB_SLOTS)])
        taken = catalog.reserve_arena(SLOT_BYTES, SLAB_SLOTS)
        # Held blocks stay: the last turns get fewer slots than they ask for.
        keys = keys[: len(taken)]
        rows, _ = catalog.publish_arena(keys, taken.slabs, taken.slots, np.zeros(len(taken), np.uint32), payload_bytes=SLOT_BYTES, namespace=0, keep=False)
        sources = catalog.plan_restore(keys)
        catalog.mark_used(sources)
        catalog.unpin(sources.rows)
        catalog.holds.hold(HOLDER, rows[:4], float(turn))
        _store_on_volume(catalog, volume, turn)
    catalog.holds.expire(100.0)
    catalog.drop(catalog.rows_of_namespace(0))


def _store_on_volume(catalog: Catalog, volume: int, turn: int) -> None:
    pool = catalog.volumes[volume]
    keys = keys_array([bytes([200 - turn, number]) * (KEY_BYTES // 2) for number in range(SLAB_SLOTS)])
    # Two sizes, so that slabs are also cut anew.
    taken = catalog.reserve_volume(volume, SLOT_BYTES * (1 + turn // 4), SLAB_SLOTS)
    for wish in pool.take_wishes():
        pool.ready(wish.slab, b"")
    if len(taken) == SLAB_SLOTS:
        catalog.publish_volume(volume, keys, taken.slabs, taken.slots, payload_bytes=SLOT_BYTES, namespace=0, keep=False, durable=True)
    else:
        catalog.free_reserved(volume, taken.slabs, taken.slots)
