"""CRC32C of payloads: hardware-fast on the CPU, and computable in parallel on a GPU since CRCs of pieces combine exactly."""

from typing import Any

import numpy.typing as npt
from awscrt.checksums import crc32c as _crc32c
from typing_extensions import Buffer


def crc32c(data: Buffer | npt.NDArray[Any], value: int = 0) -> int:
    """CRC32C (Castagnoli, RFC 3720) of `data`, continuing from `value`. Releases the GIL for long buffers."""
    return int(_crc32c(data, value))
