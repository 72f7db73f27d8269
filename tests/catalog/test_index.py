"""The block index against a dict, with keys crafted to collide, and its promises about memory."""

import gc
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offloadd.catalog.index import BUCKET_ENTRIES, KEY_DTYPE, OVERFLOW_ENTRY_BYTES, BlockIndex, IndexFull, Keys, keys_array
from offloadd.errors import LimitExceeded

TOP = (1 << 64) - 1


def crafted_key(word_a: int, word_b: int, word_print: int, rest: int) -> bytes:
    """A key from its four words: bucket A, bucket B, fingerprint (low 16 bits), rest."""
    return b"".join(word.to_bytes(8, "little") for word in (word_a, word_b, word_print, rest))


def random_keys(count: int, seed: int = 1) -> Keys:
    return np.frombuffer(np.random.default_rng(seed).bytes(32 * count), dtype=KEY_DTYPE)


def one_bucket_keys(count: int) -> list[bytes]:
    """Keys with one and the same bucket twice and the same fingerprint; the first is all zeros."""
    return [crafted_key(0, 0, 0, number) for number in range(count)]


def snapshot(index: BlockIndex, keys: Keys) -> tuple[int, bytes, int]:
    return len(index), index.lookup(keys).tobytes(), len(index._overflow)


#: Only the first and the last bucket are ever chosen, fingerprints are 0 or 7, and fingerprint 7 also comes with other high bits.
POOL = [crafted_key(a, b, p, n) for a, b, p, n in product((0, TOP), (0, TOP), (0, 7, TOP - TOP % (1 << 16) + 7), range(4))]
KEY_LISTS = st.lists(st.sampled_from(POOL), unique=True, max_size=20)


class IndexBesideDict(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = BlockIndex(capacity=capacity)
        self.rows: dict[bytes, int] = {}

    @rule(keys=KEY_LISTS)
    def insert(self, keys: list[bytes]) -> None:
        absent = [key for key in keys if key not in self.rows]
        if len(self.rows) + len(absent) > self.capacity:
            with pytest.raises(IndexFull):
                self.index.insert(keys_array(absent))
            return
        rows = self.index.insert(keys_array(absent)).tolist()
        assert not set(rows) & set(self.rows.values())
        self.rows.update(zip(absent, rows, strict=True))

    @rule(keys=KEY_LISTS)
    def insert_with_present(self, keys: list[bytes]) -> None:
        if any(key in self.rows for key in keys):
            with pytest.raises((ValueError, IndexFull)):
                self.index.insert(keys_array(keys))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.rows:
            keys = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
            self.index.delete(np.array([self.rows.pop(key) for key in keys], dtype=np.uint32))

    @rule(data=st.data())
    def delete_with_dead(self, data: st.DataObject) -> None:
        dead = sorted(set(range(self.capacity + 2)) - set(self.rows.values()))
        rows = [*self.rows.values()][:2]
        rows.insert(data.draw(st.integers(0, len(rows))), data.draw(st.sampled_from(dead)))
        with pytest.raises(ValueError, match="row"):
            self.index.delete(np.array(rows))

    @rule(keys=st.lists(st.sampled_from(POOL)))
    def lookup(self, keys: list[bytes]) -> None:
        assert self.index.lookup(keys_array(keys)).tolist() == [self.rows.get(key, 0) for key in keys]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert len(self.index) == len(self.rows)
            assert self.index.lookup(keys_array(POOL)).tolist() == [self.rows.get(key, 0) for key in POOL]
            assert [key.tobytes() for key in self.index.keys_of(np.array([*self.rows.values()], dtype=np.uint32))] == list(self.rows)


IndexBesideDict.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestIndexBesideDict = IndexBesideDict.TestCase


def test_a_fingerprint_alone_never_gives_a_row() -> None:
    """Equal buckets, equal fingerprint, and each of the 30 other bytes in turn the only difference; high words chosen to keep the buckets."""
    index = BlockIndex(capacity=4)
    stored = bytes(range(32))
    index.insert(keys_array([stored]))
    for position in range(32):
        if position not in (16, 17):
            other = stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :]
            key = keys_array([other])
            assert index._buckets_of(key.view(np.uint64).reshape(-1, 4)).tolist() == [[0, 0]]
            assert index.lookup(key).tolist() == [0], f"byte {position} was not compared"
    assert index.lookup(keys_array([stored])).tolist() == [1]


def test_the_key_of_zeros_is_absent_until_inserted() -> None:
    index = BlockIndex(capacity=4)
    zeros = keys_array([bytes(32)])
    assert index.lookup(zeros).tolist() == [0]
    row = index.insert(zeros)
    assert index.lookup(zeros).tolist() == row.tolist() != [0]
    index.delete(row)
    assert index.lookup(zeros).tolist() == [0]
    index.check()


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_keys_beyond_their_full_buckets_are_still_found_and_deleted(batch: int) -> None:
    index = BlockIndex(capacity=41)
    keys = keys_array(one_bucket_keys(40))
    rows = np.concatenate([index.insert(keys[start : start + batch]) for start in range(0, 40, batch)])
    assert len(index._overflow) == 40 - BUCKET_ENTRIES
    assert index.lookup(keys).tolist() == rows.tolist()
    index.check()
    with pytest.raises(ValueError, match="key 0 of 1 is present"):
        index.insert(keys[39:])
    index.delete(rows[::-2])
    index.check()
    assert np.flatnonzero(index.lookup(keys)).tolist() == list(range(0, 40, 2))
    index.delete(rows[::2])
    assert len(index) == 0 and not index._overflow


def test_a_key_enters_the_emptier_of_its_buckets() -> None:
    index = BlockIndex(capacity=40)
    index.insert(keys_array(one_bucket_keys(3)))
    index.insert(keys_array([crafted_key(0, TOP, 0, 1), crafted_key(TOP, 0, 0, 2)]))
    used = (index._table > 0).sum(axis=1)
    assert used[0] == 3 and used[-1] == 2


def test_a_key_enters_the_overflow_only_when_both_buckets_are_full() -> None:
    index = BlockIndex(capacity=40)
    index.insert(keys_array(one_bucket_keys(BUCKET_ENTRIES)))
    index.insert(keys_array([crafted_key(0, TOP, 0, number) for number in range(BUCKET_ENTRIES)]))
    assert not index._overflow
    index.insert(keys_array([crafted_key(TOP, 0, 0, 0)]))
    assert len(index._overflow) == 1
    index.check()


def test_a_full_index_at_half_load_leaves_nothing_to_the_overflow() -> None:
    """One batch, so that the keys also compete among themselves for entries."""
    index = BlockIndex(capacity=50_000)
    keys = random_keys(50_000)
    rows = index.insert(keys)
    assert rows.tolist() == list(range(1, 50_001))
    assert not index._overflow
    assert index.lookup(keys).tolist() == rows.tolist()
    assert not index.lookup(random_keys(50_000, seed=2)).any()
    index.check()


def test_a_full_index_refuses_and_changes_nothing() -> None:
    index = BlockIndex(capacity=10)
    keys = random_keys(12)
    index.insert(keys[:9])
    before = snapshot(index, keys)
    with pytest.raises(IndexFull, match="2 keys to insert beside 9 blocks; the index has capacity for 10") as refused:
        index.insert(keys[9:11])
    assert isinstance(refused.value, LimitExceeded)
    assert snapshot(index, keys) == before
    index.check()
    index.insert(keys[9:10])
    with pytest.raises(IndexFull):
        index.insert(keys[10:11])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([4, 5, 2, 6], "key 2 of 4 is present already, in row 3"),
        ([4, 5, 6, 5], "key 3 of 4 repeats key 1"),
    ],
)
def test_present_and_repeated_keys_are_refused_by_position_and_nothing_changes(positions: list[int], message: str) -> None:
    index = BlockIndex(capacity=10)
    keys = random_keys(8)
    index.insert(keys[:4])
    before = snapshot(index, keys)
    with pytest.raises(ValueError, match=message):
        index.insert(keys[positions])
    assert snapshot(index, keys) == before
    index.check()


def test_keys_that_share_a_word_are_not_taken_for_repeated() -> None:
    index = BlockIndex(capacity=10)
    assert index.insert(keys_array([crafted_key(5, number, 5, 5) for number in range(10)])).tolist() == list(range(1, 11))
    index.check()


@pytest.mark.parametrize(
    ("rows", "message"),
    [([1, 2, 1], "row 1 is named twice"), ([1, 5], "row 5, number 1 of 2, is not live"), ([0], "row 0"), ([11], "row 11"), ([-1], "row -1")],
)
def test_rows_that_are_not_live_and_distinct_are_refused_and_nothing_changes(rows: list[int], message: str) -> None:
    index = BlockIndex(capacity=10)
    keys = random_keys(4)
    index.insert(keys)
    before = snapshot(index, keys)
    with pytest.raises(ValueError, match=message):
        index.delete(np.array(rows))
    assert snapshot(index, keys) == before
    index.check()


def test_a_deleted_row_is_handed_out_again_for_another_key() -> None:
    index = BlockIndex(capacity=3)
    keys = random_keys(4)
    rows = index.insert(keys[:3])
    index.delete(rows[1:2])
    assert index.keys_of(rows[1:2]).tobytes() == bytes(32)
    assert index.insert(keys[3:]).tolist() == rows[1:2].tolist()
    assert index.lookup(keys).tolist() == [1, 0, 3, 2]
    assert index.keys_of(np.array([2, 1])).tobytes() == keys[3].tobytes() + keys[0].tobytes()


def test_empty_batches_do_nothing() -> None:
    index = BlockIndex(capacity=1)
    none = keys_array([])
    assert index.lookup(none).shape == index.insert(none).shape == index.keys_of(index.lookup(none)).shape == (0,)
    index.delete(index.lookup(none))
    index.check()


def test_keys_may_be_strided_and_unaligned() -> None:
    keys = random_keys(20)
    index = BlockIndex(capacity=20)
    records = np.zeros(20, dtype=[("pad", "u1"), ("key", KEY_DTYPE), ("more", "V7")])
    records["key"] = keys
    rows = index.insert(records["key"])
    assert index.lookup(np.frombuffer(b"x" + keys.tobytes(), dtype=np.uint8)[1:].view(KEY_DTYPE)).tolist() == rows.tolist()
    index.check()


def test_keys_of_another_shape_or_length_are_refused() -> None:
    index = BlockIndex(capacity=4)
    wrongs: list[npt.NDArray[Any]] = [np.zeros(4, dtype="V16"), np.zeros((2, 2), dtype=KEY_DTYPE), np.zeros(4, dtype=np.uint64)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="a vector of"):
            index.lookup(wrong)
    with pytest.raises(ValueError, match="key 1 has 31 bytes; a key has 32"):
        keys_array([bytes(32), bytes(31), bytes(33)])
    with pytest.raises(ValueError, match="capacity is 1 to"):
        BlockIndex(capacity=0)


def test_the_index_costs_at_most_60_bytes_a_block_and_counts_its_columns() -> None:
    index = BlockIndex(capacity=100_000)
    assert index.bytes_per_block() <= 60
    alone = index.bytes_allocated
    places = index.column(np.dtype("<u8"))
    assert places.shape == (100_001,) and not places.any()
    assert index.bytes_allocated == alone + places.nbytes
    index.insert(random_keys(100_000))
    assert index.bytes_allocated == alone + places.nbytes, "filling grew something"


def test_keys_in_the_overflow_are_counted_as_memory() -> None:
    index = BlockIndex(capacity=40)
    alone = index.bytes_allocated
    index.insert(keys_array(one_bucket_keys(10)))
    assert index.bytes_allocated == alone + 2 * OVERFLOW_ENTRY_BYTES


def test_there_is_no_python_object_per_block() -> None:
    index = BlockIndex(capacity=20_000)
    keys = random_keys(20_000)
    index.insert(keys[:1000])
    gc.collect()
    objects = sys.getallocatedblocks()
    index.insert(keys[1000:])
    gc.collect()
    assert sys.getallocatedblocks() - objects < 1000


def lose_an_entry(index: BlockIndex) -> None:
    index._table_flat[np.flatnonzero(index._table_flat)[0]] = 0


def list_a_row_twice(index: BlockIndex) -> None:
    index._table_flat[np.flatnonzero(index._table_flat == 0)[0]] = 3


def change_a_fingerprint(index: BlockIndex) -> None:
    index._fingerprints.reshape(-1)[np.flatnonzero(index._table_flat)[0]] ^= 1


def leave_a_fingerprint(index: BlockIndex) -> None:
    index._fingerprints.reshape(-1)[np.flatnonzero(index._table_flat == 0)[0]] = 1


def move_an_entry(index: BlockIndex) -> None:
    """To the first free entry outside the key's two buckets."""
    source = int(np.flatnonzero(index._table_flat)[0])
    row = index._table_flat[source]
    buckets = index._buckets_of(index._words[row : row + 1]).tolist()[0]
    target = next(e for e in np.flatnonzero(index._table_flat == 0).tolist() if e // BUCKET_ENTRIES not in buckets)
    for array in (index._table_flat, index._fingerprints.reshape(-1)):
        array[target], array[source] = array[source], 0


def flip_a_key(index: BlockIndex) -> None:
    index._words[7, 0] ^= np.uint64(1 << 63)


def give_two_rows_one_key(index: BlockIndex) -> None:
    """Row 7 takes key, bucket and fingerprint of row 8: only that the key has two rows is wrong."""
    flat, prints = index._table_flat, index._fingerprints.reshape(-1)
    old, twin = (int(np.flatnonzero(flat == row)[0]) for row in (7, 8))
    bucket = twin // BUCKET_ENTRIES * BUCKET_ENTRIES
    new = bucket + int(np.flatnonzero(flat[bucket : bucket + BUCKET_ENTRIES] == 0)[0])
    index._words[7] = index._words[8]
    flat[old], prints[old] = 0, 0
    flat[new], prints[new] = 7, prints[twin]


def free_a_live_row(index: BlockIndex) -> None:
    index._free[index._free_count - 1] = 5


def lose_a_free_row(index: BlockIndex) -> None:
    index._free_count -= 1


def point_beyond_the_end(index: BlockIndex) -> None:
    index._table_flat[np.flatnonzero(index._table_flat)[0]] = index.capacity + 1


def write_to_row_0(index: BlockIndex) -> None:
    index._words[0] = 1


def rename_an_overflow_key(index: BlockIndex) -> None:
    key, row = index._overflow.popitem()
    index._overflow[key[:31] + b"\xff"] = row


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_an_entry,
        list_a_row_twice,
        change_a_fingerprint,
        leave_a_fingerprint,
        move_an_entry,
        flip_a_key,
        give_two_rows_one_key,
        free_a_live_row,
        lose_a_free_row,
        point_beyond_the_end,
        write_to_row_0,
        rename_an_overflow_key,
    ],
)
def test_check_sees_a_corrupted_index(corrupt: Callable[[BlockIndex], None]) -> None:
    index = BlockIndex(capacity=60)
    index.insert(random_keys(30))
    index.insert(keys_array(one_bucket_keys(12)))
    assert index._overflow
    index.check()
    corrupt(index)
    with pytest.raises(AssertionError):
        index.check()
