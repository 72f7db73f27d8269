"""The tables of crc32c.cu: products of bytes and of 1 with powers of x modulo the polynomial of CRC32C, bits reflected.

Everything is made by `combine`, the arithmetic that the CPU's checksums of long blocks rest on.
"""

import numpy as np
import numpy.typing as npt

from offloadd.transfer.combine import combine
from offloadd.transfer.kernels.source import CRC_PADS, CRC_PIECE_BYTES, CRC_ROW_BYTES, CRC_THREADS, CRC_WORD_BYTES

_ONE = 1 << 31
#: x^(2^31 - 1) is 1 modulo the polynomial (x + 1 times a primitive one of degree 31), so this many bytes carry a CRC once around.
_PERIOD_BYTES = (1 << 31) - 1
_PIECES = 256


def crc_tables() -> npt.NDArray[np.uint32]:
    """`struct Tables` of crc32c.cu, field after field."""
    step = [entry for place in range(CRC_WORD_BYTES) for entry in _byte_products(CRC_ROW_BYTES - place)]
    thread = _powers(-CRC_WORD_BYTES, CRC_THREADS)
    piece = _powers(CRC_PIECE_BYTES, _PIECES)
    pieces = _powers(CRC_PIECE_BYTES * _PIECES, _PIECES)
    pad = _powers(-1, CRC_PADS)
    return np.array(step + thread + piece + pieces + pad, dtype=np.uint32)


def _byte_products(size_bytes: int) -> list[int]:
    """Each of 256 bytes, first of a message, after `size_bytes` bytes (itself among them)."""
    products = [0]
    for bit in range(8):
        product = combine(1 << bit, 0, size_bytes)
        products += [known ^ product for known in products]
    return products


def _powers(step_bytes: int, count: int) -> list[int]:
    """x^(8 * step_bytes * number) for numbers 0 to count - 1; a negative step takes bytes back."""
    powers = [_ONE]
    while len(powers) < count:
        powers.append(combine(powers[-1], 0, step_bytes % _PERIOD_BYTES))
    return powers
