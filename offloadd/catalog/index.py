"""The index: from 32-byte keys to row numbers, in flat arrays, with no pause however many blocks there are.

    key (32 B) ──┬── word 0 ──► bucket A ┐    bucket: 8 entries of (fingerprint u16, row u32), row 0 = empty
                 ├── word 1 ──► bucket B ┴──► entry whose fingerprint is word 2's ──► row ──► all 32 bytes compared
                 └── word 2 ──► fingerprint

    row:   free ── insert ──► live ── delete ──► free

Keys are SHA-256 digests, so their words are their own hashes. Of its two buckets a key enters the emptier, which at 50 % load practically never fills one;
a key that finds both full lives in a small dict. The table never grows and never rehashes: either would stop the event loop for tens of milliseconds at a
million blocks. There is no Python object per block, for the sake of memory and of the garbage collector.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from offloadd.errors import LimitExceeded

KEY_BYTES = 32
KEY_DTYPE = np.dtype(f"V{KEY_BYTES}")

#: 8 fingerprints are 16 bytes and 8 rows 32: sizes for which NumPy's take has a loop of its own, so a bucket is one cheap gather.
BUCKET_ENTRIES = 8
#: Table entries per row. At 2 (50 % load) a million random keys leave none to the overflow and no bucket full; at 80 % load it was 193, at 90 % 6,728.
ENTRIES_PER_ROW = 2
#: What a key in the overflow dict costs: bytes object, int and dict entry; 139 to 165 measured.
OVERFLOW_ENTRY_BYTES = 165
#: Row numbers are uint32 and the bucket of a key comes from 32 of its bits; a billion rows of keys alone would be 32 GB.
CAPACITY_MAX = 1 << 30

Keys = npt.NDArray[np.void]
Rows = npt.NDArray[np.uint32]
_Words = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.intp]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_SHIFT = np.uint64(32)
_CHECK_ROWS = 1 << 14


class IndexFull(LimitExceeded):
    """The index has no free row for these keys; reclaim a block first. Nothing was changed."""


def keys_array(keys: Sequence[bytes]) -> Keys:
    """Pack 32-byte keys into a read-only array of shape (n,), dtype V32. Raises ValueError naming the position of a key of another length."""
    # Checking only the total would let 31 + 33 bytes through as two wrong keys.
    if set(map(len, keys)) - {KEY_BYTES}:
        position = next(position for position, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise ValueError(f"key {position} has {len(keys[position])} bytes; a key has {KEY_BYTES}")
    return np.frombuffer(b"".join(keys), dtype=KEY_DTYPE)


class BlockIndex:
    """Keys of at most `capacity` blocks, each with a row number in 1..capacity; row 0 means absent.

    Owned by one thread. All batches are arrays of shape (n,); a call costs some tens of microseconds plus a few hundred nanoseconds a key, whatever the
    number of blocks: callers that want the event loop back within 5 ms pass at most 4,096 keys at once. Every method that raises has changed nothing.
    """

    __slots__ = ("_arrays", "_bucket_count", "_capacity", "_fingerprints", "_free", "_free_count", "_keys", "_overflow", "_table", "_table_flat", "_words")

    def __init__(self, *, capacity: int) -> None:
        if not 1 <= capacity <= CAPACITY_MAX:
            raise ValueError(f"an index of {capacity} blocks; capacity is 1 to {CAPACITY_MAX}")
        self._capacity = capacity
        self._bucket_count = -(-capacity * ENTRIES_PER_ROW // BUCKET_ENTRIES)
        self._arrays: list[npt.NDArray[Any]] = []
        self._keys: Keys = self.column(KEY_DTYPE)
        #: The keys as four words each: NumPy compares 1,024 of these in 6 us and of V32 in 20.
        self._words: _Words = self._keys.view(np.uint64).reshape(-1, 4)
        #: Row of each entry, 0 if empty; shape (buckets, 8). Every live row outside `_overflow` stands in exactly one entry of a bucket of its key.
        self._table: Rows = self._register(np.zeros((self._bucket_count, BUCKET_ENTRIES), dtype=np.uint32))
        self._table_flat: Rows = self._table.reshape(-1)
        #: Fingerprint of the key in each entry; 0 in empty entries, but also a legal fingerprint.
        self._fingerprints: npt.NDArray[np.uint16] = self._register(np.zeros((self._bucket_count, BUCKET_ENTRIES), dtype=np.uint16))
        # The table is hit at random: left to lazy commitment, the first batch would fault in its huge pages all at once, a pause of 10 ms at a million blocks
        # and of 58 at forty million. So it is touched here, before serving; these 16 bytes a block are the only memory that an empty index holds.
        self._table.fill(0)
        self._fingerprints.fill(0)
        #: A stack of the free rows: the first `_free_count` are free, the last of them is handed out next.
        self._free: Rows = self._register(np.arange(capacity, 0, -1, dtype=np.uint32))
        self._free_count = capacity
        #: Keys whose two buckets were full when they came.
        self._overflow: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """How many blocks fit."""
        return self._capacity

    def __len__(self) -> int:
        return self._capacity - self._free_count

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all arrays, columns included, as if wholly committed, and of the overflow."""
        return sum(array.nbytes for array in self._arrays) + len(self._overflow) * OVERFLOW_ENTRY_BYTES

    def bytes_per_block(self) -> float:
        """`bytes_allocated` over `capacity`."""
        return self.bytes_allocated / self._capacity

    def column(self, dtype: "np.dtype[_Scalar] | type[_Scalar]") -> npt.NDArray[_Scalar]:
        """A new zeroed array of shape (capacity + 1,), indexed by row and counted in `bytes_allocated`. Its values survive `delete`: the owner resets them.

        Rows are handed out in ascending order, so the kernel commits its memory as the index fills.
        """
        return self._register(_lazy_zeros(self._capacity + 1, np.dtype(dtype)))

    def lookup(self, keys: Keys) -> Rows:
        """The row of each key, 0 where absent. Keys: (n,) V32, may repeat; ValueError for another dtype or shape."""
        return self._find(_words_of(keys))

    def insert(self, keys: Keys) -> Rows:
        """Enter absent, distinct keys, (n,) V32, and return their new rows, in order.

        Raises ValueError naming the position of a key that is present or repeated, and `IndexFull` when they do not all fit.
        """
        words = _words_of(keys)
        count = len(words)
        if count > self._free_count:
            raise IndexFull(f"{count} keys to insert beside {len(self)} blocks; the index has capacity for {self._capacity}")
        present = self._find(words)
        if present.any():
            position = int(present.argmax())
            raise ValueError(f"key {position} of {count} is present already, in row {present[position]}")
        _refuse_repeated_keys(words)
        kept_free = self._free_count - count
        rows = self._free[kept_free : self._free_count][::-1].copy()
        self._free_count = kept_free
        self._words[rows] = words
        self._place(words, rows)
        return rows

    def delete(self, rows: npt.NDArray[Any]) -> None:
        """Forget live, distinct rows, (n,) of any integer type; they are free for other keys at once. Raises ValueError naming a row that is not so."""
        rows = self._live_rows(rows)
        words = self._words.take(rows, axis=0)
        entries = self._entries_of(words, rows)
        missing = np.flatnonzero(entries < 0)
        in_overflow = [words[position].tobytes() for position in missing]
        for position, key in zip(missing.tolist(), in_overflow, strict=True):
            if self._overflow.get(key) != rows[position]:
                raise ValueError(f"row {rows[position]}, number {position} of {len(rows)}, is not live")
        for key in in_overflow:
            del self._overflow[key]
        entries = entries[entries >= 0]
        self._table_flat[entries] = 0
        self._fingerprints.reshape(-1)[entries] = 0
        self._words[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def keys_of(self, rows: npt.NDArray[Any]) -> Keys:
        """A copy of the keys of these rows, (n,) V32; zeros for rows that are not live."""
        return self._keys.take(rows)

    def check(self) -> None:
        """Assert every invariant; a full pass, for tests and tools."""
        free = self._free[: self._free_count]
        placed = self._table_flat[self._table_flat > 0]
        spilled = np.fromiter(self._overflow.values(), dtype=np.uint32, count=len(self._overflow))
        all_rows = np.concatenate([free, placed, spilled])
        assert int(all_rows.max(initial=0)) <= self._capacity, f"row {all_rows.max()} of {self._capacity}"
        owners = np.bincount(all_rows, minlength=self._capacity + 1)
        assert owners[0] == 0, "row 0 is free or live"
        wrong = np.flatnonzero(owners[1:] != 1) + 1
        assert not wrong.size, f"{wrong.size} rows are not exactly once in table, overflow or free stack; the first is {wrong[0]}"
        assert len(self) == len(placed) + len(spilled), f"{len(self)} blocks counted, {len(placed)} in the table and {len(spilled)} in the overflow"
        for key, row in self._overflow.items():
            assert self._keys[row].tobytes() == key, f"row {row} of the overflow has another key"
        assert not self._fingerprints[self._table == 0].any(), "an empty entry has a fingerprint"
        assert not self._words[0].any(), "row 0 has a key"
        # Two live rows with one key are seen here too: the lookup gives both keys the same row.
        live = np.concatenate([placed, spilled])
        for start in range(0, len(live), _CHECK_ROWS):
            part = live[start : start + _CHECK_ROWS]
            lost = part[self._find(self._words.take(part, axis=0)) != part]
            assert not lost.size, f"{lost.size} live rows are not found by their keys; the first is {lost[0]}"

    def _register(self, array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        self._arrays.append(array)
        return array

    def _buckets_of(self, words: _Words) -> _Indices:
        """Both buckets of each key, (n, 2): 32 bits of words 0 and 1, scaled to the bucket count by multiply-shift, so that it need not be a power of two."""
        return (((words[:, :2] >> _SHIFT) * np.uint64(self._bucket_count)) >> _SHIFT).astype(np.intp)

    def _find(self, words: _Words) -> Rows:
        found: Rows = np.zeros(len(words), dtype=np.uint32)
        buckets = self._buckets_of(words).reshape(-1)
        same_print = self._fingerprints.take(buckets, axis=0).reshape(-1, 2 * BUCKET_ENTRIES) == _fingerprints_of(words)[:, None]
        hits = np.flatnonzero(same_print)
        positions = hits // (2 * BUCKET_ENTRIES)
        rows = self._table_flat.take(buckets.take(hits // BUCKET_ENTRIES) * BUCKET_ENTRIES + hits % BUCKET_ENTRIES)
        # 16 fingerprints of 16 bits agree by chance once in 4,096 lookups: only all 32 bytes decide. Row 0 has the key of zeros, which is a legal key too.
        differ = self._words.take(rows, axis=0) ^ words.take(positions, axis=0)
        same = ((differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0) & (rows != 0)
        found[positions[same]] = rows[same]
        if self._overflow:
            for position in np.flatnonzero(found == 0).tolist():
                found[position] = self._overflow.get(words[position].tobytes(), 0)
        return found

    def _place(self, words: _Words, rows: Rows) -> None:
        """Give each new row an entry. Keys of one batch may want the same entry: all write, the one that reads itself back has it, the rest try again."""
        buckets = self._buckets_of(words)
        prints = _fingerprints_of(words)
        pending = np.arange(len(rows))
        while pending.size:
            empty = self._table.take(buckets[pending].reshape(-1), axis=0).reshape(-1, 2, BUCKET_ENTRIES) == 0
            empty_count = empty.sum(axis=2, dtype=np.uint8)
            side = (empty_count[:, 1] > empty_count[:, 0]).astype(np.intp)
            has_room = (empty_count[:, 0] | empty_count[:, 1]) != 0
            if not has_room.all():
                for position in pending[~has_room].tolist():
                    self._overflow[words[position].tobytes()] = int(rows[position])
                pending, side, empty = pending[has_room], side[has_room], empty[has_room]
            slot = empty[np.arange(len(pending)), side].argmax(axis=1)
            entries = buckets[pending, side] * BUCKET_ENTRIES + slot
            wanted = rows[pending]
            self._table_flat[entries] = wanted
            won = self._table_flat[entries] == wanted
            self._fingerprints.reshape(-1)[entries[won]] = prints[pending[won]]
            pending = pending[~won]

    def _live_rows(self, rows: npt.NDArray[Any]) -> _Indices:
        """The rows as indices, distinct and in range; whether they are live shows when their entries are sought."""
        if rows.ndim != 1 or rows.dtype.kind not in "ui":
            raise ValueError(f"rows have dtype {rows.dtype} and shape {rows.shape}; a vector of integers is needed")
        if rows.size:
            ordered = np.sort(rows)
            if ordered[0] < 1 or ordered[-1] > self._capacity:
                wrong = ordered[0] if ordered[0] < 1 else ordered[-1]
                raise ValueError(f"row {wrong} does not exist; rows are 1 to {self._capacity}")
            repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
            if repeated.size:
                raise ValueError(f"row {ordered[repeated[0]]} is named twice")
        return rows.astype(np.intp)

    def _entries_of(self, words: _Words, rows: _Indices) -> _Indices:
        """The table entry that holds each row, -1 where none does."""
        buckets = self._buckets_of(words).reshape(-1)
        hits = np.flatnonzero(self._table.take(buckets, axis=0).reshape(-1, 2 * BUCKET_ENTRIES) == rows.astype(np.uint32)[:, None])
        entries = np.full(len(rows), -1, dtype=np.intp)
        # A key whose two buckets are one hits twice, both times in the same entry.
        entries[hits // (2 * BUCKET_ENTRIES)] = buckets[hits // BUCKET_ENTRIES] * BUCKET_ENTRIES + hits % BUCKET_ENTRIES
        return entries


def _lazy_zeros(count: int, dtype: "np.dtype[_Scalar]") -> npt.NDArray[_Scalar]:
    """Zeros that are committed by small pages. np.zeros asks for huge ones, and to clear one of 2 MiB has taken 5 to 8 ms inside a virtual machine."""
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # EINVAL: a kernel without transparent huge pages, which has nothing to be told.
    with suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=count)


def _words_of(keys: Keys) -> _Words:
    """The keys as (n, 4) uint64, without a copy if they are contiguous."""
    if keys.dtype != KEY_DTYPE or keys.ndim != 1:
        raise ValueError(f"keys have dtype {keys.dtype} and shape {keys.shape}; a vector of {KEY_DTYPE} is needed")
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 4)


def _fingerprints_of(words: _Words) -> npt.NDArray[np.uint16]:
    return words[:, 2].astype(np.uint16)


def _refuse_repeated_keys(words: _Words) -> None:
    # Sorting one word is enough to see that all differ; equal words of different keys (once in 2^64, or crafted) only cost the slow look.
    ordered = np.sort(words[:, 0])
    if not (ordered[1:] == ordered[:-1]).any():
        return
    first_position: dict[bytes, int] = {}
    for position in range(len(words)):
        first = first_position.setdefault(words[position].tobytes(), position)
        if first != position:
            raise ValueError(f"key {position} of {len(words)} repeats key {first}")
