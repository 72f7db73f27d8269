"""CRC32C of payloads: hardware-fast on the CPU, and computable in parallel on a GPU since CRCs of pieces combine exactly.

Two libraries compute it, and which one is faster depends on the CPU: with AVX-512 `awscrt` is 1.4 times as fast, on an EPYC without it `crc32c` twice. So a
process that checks payloads tries both once, for some milliseconds, and takes the faster one.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import awscrt.checksums
import crc32c as _crc32c_package
import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Function = Callable[[Any, int], int]

LIBRARIES: Final[dict[str, Function]] = {"awscrt": awscrt.checksums.crc32c, "crc32c": _crc32c_package.crc32c}
#: RFC 3720, B.4, and the check value of the CRC catalogue.
_KNOWN: Final = ((b"\0" * 32, 0x8A9136AA), (b"123456789", 0xE3069283))
#: As long as a slice of some blocks, and longer than a core's own cache, where the libraries differ less.
_TRIAL_BYTES = 4 << 20
_TRIALS = 4

_function: Function = LIBRARIES["awscrt"]


def crc32c(data: Buffer | npt.NDArray[Any], value: int = 0) -> int:
    """CRC32C (Castagnoli, RFC 3720) of `data`, continuing from `value`. Releases the GIL for long buffers."""
    return int(_function(data, value))


def choose_fastest(libraries: dict[str, Function] = LIBRARIES) -> str:
    """Compute all later checksums by the library that is fastest on this CPU; its name. Takes some milliseconds; for the start of a process.

    Raises RuntimeError if one of them computes anything else than CRC32C here: then no checksum of this machine can be trusted.
    """
    global _function
    data = np.arange(_TRIAL_BYTES // 8, dtype=np.uint64).view(np.uint8)
    seconds = dict.fromkeys(libraries, float("inf"))
    found = set()
    for name, function in libraries.items():
        for text, expected in _KNOWN:
            if function(text, 0) != expected:
                raise RuntimeError(f"the library {name} computes {function(text, 0):#010x} as CRC32C of {text!r}; it is {expected:#010x}")
    # In turn, and the best of some: a machine that is busy for a moment must not decide.
    for _ in range(_TRIALS):
        for name, function in libraries.items():
            start = time.perf_counter()
            found.add(function(data, 0))
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    if len(found) != 1:
        raise RuntimeError(f"the libraries {', '.join(libraries)} compute different CRC32Cs of the same {_TRIAL_BYTES} bytes")
    fastest = min(seconds, key=seconds.__getitem__)
    _function = libraries[fastest]
    return fastest
