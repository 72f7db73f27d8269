"""The C twin of `offloadd.transfer.gather`: the same copies, and the CRC32C of each payload taken while it is in the core's cache.

`moves.c` is built with the package where there is a C compiler; without one NumPy does the same, more slowly. On 2 cores, pieces of 4 KiB scatter, verified,
half as fast again by it, and single payloads of 640 KiB by a fifth to a third (`python -m bench.restore_latency --part pipeline`).
"""

import ctypes
import hashlib
import platform
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.transfer.checksum import crc32c
from offloadd.transfer.gather import Checks, Indices, Payloads, Views, block_crc, gather, payload_bytes, scatter

_MODULE = "offloadd.transfer._moves"
#: What this module is written for; see INTERFACE in moves.c.
_INTERFACE = 3
#: `Library.ways` where it uses no instruction that not every CPU has.
PORTABLE = "portable C"


class NativeUnavailableError(Exception):
    """The library can't be used; the text says why."""


class _Group(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("planes", ctypes.c_int64),
        ("plane_step", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("piece", ctypes.c_int64),
        ("block_count", ctypes.c_int64),
    )


class _Move(ctypes.Structure):
    _fields_ = (
        ("groups", ctypes.c_void_p),
        ("group_count", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ours", ctypes.c_void_p),
        ("ours_bytes", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("checksums", ctypes.c_void_p),
        ("expected", ctypes.c_void_p),
        ("past_caches", ctypes.c_int64),
        ("checksum_ns", ctypes.c_int64),
        ("copy_ns", ctypes.c_int64),
    )


class Library:
    """`moves.c`, loaded. `ways`: the widest instructions that it uses on this CPU, such as "AVX-512"."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file is no library, NativeUnavailableError if it is another version's."""
        # A CDLL call releases the GIL.
        library = ctypes.CDLL(path)
        try:
            interface = int(library.offloadd_interface())
        except AttributeError as error:
            raise NativeUnavailableError(f"{path} is not built from moves.c") from error
        if interface != _INTERFACE:
            raise NativeUnavailableError(f"{path} has interface {interface}; {_INTERFACE} is needed: install offloadd again")
        library.offloadd_ways.restype = ctypes.c_char_p
        library.offloadd_crc32c.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
        library.offloadd_crc32c.restype = ctypes.c_uint32
        library.offloadd_sha256_each.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
        library.offloadd_sha256_each.restype = ctypes.c_int
        for function in (library.offloadd_gather, library.offloadd_scatter):
            function.argtypes = (ctypes.c_void_p,)
            function.restype = ctypes.c_int
        self._library = library
        self.ways = str(library.offloadd_ways().decode())

    def crc32c(self, data: npt.NDArray[np.uint8], value: int = 0) -> int:
        """CRC32C of contiguous bytes, continuing from `value`."""
        return int(self._library.offloadd_crc32c(_address(data), data.nbytes, value))

    def sha256_each(self, prefix: bytes, items: bytes, item_bytes: int) -> bytes | None:
        """SHA-256 of the prefix with each of the items (that lie one after the other) behind it, 32 bytes each; None where the CPU has no instruction for it,
        or messages are too long."""
        count = len(items) // item_bytes
        digests = bytearray(32 * count)
        if self._library.offloadd_sha256_each(prefix, len(prefix), items, item_bytes, count, ctypes.addressof(ctypes.c_char.from_buffer(digests))):
            return None
        return bytes(digests)

    def pieces(self, views: Views) -> "Pieces":
        """What gathers from and scatters to these views."""
        return Pieces(self._library, views)


class Pieces:
    """Views of engine memory, as C sees them. Their memory must stay mapped during calls."""

    def __init__(self, library: Any, views: Views) -> None:
        self._library = library
        #: What the addresses below belong to.
        self._views = views
        self._groups = (_Group * len(views))(*(_group_of(view) for view in views))
        self._block_count = views[0].shape[1]
        self._payload_bytes = payload_bytes(views)

    def gather(self, block_indices: Indices, target: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """As `offloadd.transfer.gather.gather`; `checks.checksums` are those of the bytes as the engine has them."""
        self._move(self._library.offloadd_gather, block_indices, target, first, last, checks)

    def scatter(self, block_indices: Indices, source: Payloads, first: int, last: int | None, checks: Checks | None = None) -> None:
        """As `offloadd.transfer.gather.scatter`. A block whose checksum is not `checks.expected` is left alone, every byte of it."""
        self._move(self._library.offloadd_scatter, block_indices, source, first, last, checks)

    def _move(self, function: Any, block_indices: Indices, ours: Payloads, first: int, last: int | None, checks: Checks | None) -> None:
        count = len(block_indices)
        end = self._payload_bytes if last is None else last
        blocks = np.ascontiguousarray(block_indices, dtype=np.int64)
        offsets = np.ascontiguousarray(ours.offsets, dtype=np.int64)
        # Their lengths are all that C can't know.
        if len(offsets) != count or (checks is not None and (checks.count != count or not _fit(checks))):
            raise ValueError(f"{count} blocks were named with {len(offsets)} places and {checks.count if checks else 0} checksums")
        if not ours.buffer.flags.c_contiguous:
            raise ValueError("payloads lie in a buffer that is not contiguous")
        move = _Move(
            groups=ctypes.addressof(self._groups),
            group_count=len(self._groups),
            blocks=_address(blocks),
            count=count,
            ours=_address(ours.buffer),
            ours_bytes=ours.buffer.nbytes,
            offsets=_address(offsets),
            first=first,
            last=end,
            checksums=_address(checks.checksums) if checks else None,
            past_caches=ours.past_caches,
            expected=_address(checks.expected) if checks and checks.expected is not None else None,
        )
        problem = function(ctypes.byref(move))
        if problem:
            raise ValueError(self._told(problem, blocks, offsets, ours.buffer.nbytes, first, end))
        if checks is not None:
            checks.spent_ns += move.checksum_ns

    def _told(self, problem: int, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], ours_bytes: int, first: int, last: int) -> str:
        match problem:
            case -1:
                return f"block index {int(blocks.max())} is outside the region of {self._block_count} blocks"
            case -2:
                return f"payloads of {last - first} bytes at offsets {int(offsets.min())} to {int(offsets.max())} leave their buffer of {ours_bytes}"
            case _:
                return f"payload bytes {first} to {last} were asked for; a payload has {self._payload_bytes}"


def _fit(checks: Checks) -> bool:
    arrays = [checks.checksums, *([checks.expected] if checks.expected is not None else [])]
    return all(array.dtype == np.uint32 and array.flags.c_contiguous and len(array) == checks.count for array in arrays)


def _group_of(view: npt.NDArray[np.uint8]) -> _Group:
    planes, blocks, piece = view.shape
    step, stride, one = view.strides
    if one != 1 and piece > 1:
        raise ValueError(f"pieces with {one} bytes between neighbours can't be copied as runs of bytes")
    return _Group(_address(view), planes, step, stride, piece, blocks)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def load() -> Library:
    """The library, after it has shown on this CPU that it copies and computes what NumPy and the checksum library do.

    Takes some milliseconds. Raises NativeUnavailableError.
    """
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise NativeUnavailableError("it was not built: install a C compiler and then offloadd again")
    try:
        library = Library(spec.origin)
    except OSError as error:
        raise NativeUnavailableError(f"{spec.origin} can't be loaded: {error}") from error
    if library.ways == PORTABLE:
        # Its checksum, a byte at a time, is slower than the library's that NumPy's way uses.
        raise NativeUnavailableError(f"it has no fast way for this CPU ({platform.machine()})")
    _prove(library)
    return library


def _prove(library: Library) -> None:
    """A compiler or a CPU that gets one of its instructions wrong must not be found by a checksum that nothing agrees with later."""
    random = np.random.default_rng(0)
    data = random.integers(0, 256, 1 << 20, dtype=np.uint8)
    for length in (0, 1, 9, 63, 64, 255, 256, 1000, 4080, 4096, 65_537, data.size - 3):
        found, expected = library.crc32c(data[3 : 3 + length], length), crc32c(data[3 : 3 + length], length)
        if found != expected:
            raise NativeUnavailableError(f"its CRC32C of {length} bytes is {found:#010x}, not {expected:#010x}: the NumPy way is used")
    for prefix_bytes, item_bytes in ((51, 32), (51, 1), (0, 64), (55, 9), (119, 64)):
        prefix, items = data[:prefix_bytes].tobytes(), data[-3 * item_bytes :].tobytes()
        digests = library.sha256_each(prefix, items, item_bytes)
        if digests is not None and digests != b"".join(hashlib.sha256(prefix + items[i * item_bytes : (i + 1) * item_bytes]).digest() for i in range(3)):
            raise NativeUnavailableError(f"its SHA-256 of {prefix_bytes} and {item_bytes} bytes is not hashlib's: the NumPy way is used")
    # Rows that are no multiples of anything, behind each other and apart; the second one is long enough to be stored past the caches.
    for piece, planes, blocks in ((37, 3, 5), (2_011, 40, 4)):
        stride = piece + 5
        memory = data[7 : 7 + planes * blocks * stride].copy()
        views = (np.ndarray((planes, blocks, piece), np.uint8, memory, strides=(blocks * stride, stride, 1)),)
        chosen = np.arange(blocks)[::-1].copy()
        theirs, ours = (
            Payloads(np.zeros(planes * piece * blocks, np.uint8), np.arange(blocks) * planes * piece, planes * piece, past_caches=True) for _ in range(2)
        )
        checks = Checks.of(blocks)
        gather(views, chosen, theirs)
        library.pieces(views).gather(chosen, ours, 0, None, checks)
        right = (ours.buffer == theirs.buffer).all() and checks.checksums.tolist() == [block_crc(views, int(block)) for block in chosen]
        copy = memory.copy()
        scatter((np.ndarray(views[0].shape, np.uint8, copy, strides=views[0].strides),), chosen[::-1], theirs)
        library.pieces(views).scatter(chosen[::-1], ours, 0, None)
        if not (right and (memory == copy).all()):
            raise NativeUnavailableError(f"its copies of {planes} pieces of {piece} bytes are not those of NumPy: the NumPy way is used")
