"""Names for the blocks of a sequence by their content: full blocks are chained over the prefix, a partial tail has a name of another kind."""

import hashlib
from array import array
from collections.abc import Sequence

#: What the first block is chained to.
ROOT = bytes(32)


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """One 32-byte name per block of `tokens`; the last one is a tail's if the tokens do not fill it.

    A tail of n tokens is never named as a full block or a longer tail: the bytes behind its n-th token are undefined.
    """
    keys: list[bytes] = []
    parent = ROOT
    for start in range(0, len(tokens), block_tokens):
        part = tokens[start : start + block_tokens]
        if len(part) == block_tokens:
            parent = _digest(b"block", parent, part)
            keys.append(parent)
        else:
            keys.append(_digest(b"tail", parent, part))
    return keys


def _digest(kind: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    digest = hashlib.sha256(len(kind).to_bytes(1, "little") + kind + parent + len(tokens).to_bytes(4, "little"))
    digest.update(array("q", tokens).tobytes())
    return digest.digest()
