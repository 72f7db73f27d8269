"""What must match for the bytes of two blocks to be interchangeable, and the keys built on it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model whose KV a block holds: a layer range and a head range, not a rank number.

    Ranks that hold equal bytes (MLA; more ranks than KV heads) name the same shard and store one copy.
    """

    layer_start: int = 0
    layer_count: int = 0
    head_start: int = 0
    head_count: int = 0


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a set of blocks. Every field enters the id; a field that differs makes every lookup miss.

    `tenant` is set by the daemon from the peer's credentials, never by the client. `weights` identifies the *bytes* of the weights (a hub
    commit, or a digest over config, shard headers and samples of each shard): a path or a name is not enough. `extra` holds engine specific
    (name, value) pairs, order without meaning.
    """

    tenant: str = ""
    model: str = ""
    weights: str = ""
    adapter: str = ""
    overrides: str = ""
    engine: str = ""
    engine_version: str = ""
    attention_backend: str = ""
    isa: str = ""
    hash_algorithm: str = ""
    kv_dtype: str = ""
    codec: str = ""
    block_tokens: int = 0
    layout: str = ""
    salt: bytes = b""
    shard: Shard = Shard()
    extra: tuple[tuple[str, str], ...] = ()

    def id(self) -> bytes:
        """SHA-256 over tagged, length-prefixed fields: no two different namespaces can serialize alike."""
        digest = hashlib.sha256(b"offloadd.namespace.v1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "shard":
                for part in fields(Shard):
                    _absorb(digest, f"shard.{part.name}", str(getattr(value, part.name)).encode())
            elif field.name == "extra":
                for name, text in sorted(value):
                    _absorb(digest, f"extra.{name}", text.encode())
            elif isinstance(value, bytes):
                _absorb(digest, field.name, value)
            else:
                _absorb(digest, field.name, str(value).encode())
        return digest.digest()


def _absorb(digest: "hashlib._Hash", tag: str, value: bytes) -> None:
    name = tag.encode()
    digest.update(len(name).to_bytes(4, "little") + name + len(value).to_bytes(8, "little") + value)


KEY_BYTES = 32

#: SHA-256 of (prefix, items one after the other, bytes of an item), 32 bytes each; None where it can't.
DigestEach = Callable[[bytes, bytes, int], bytes | None]


def _by_hashlib_instead(prefix: bytes, items: bytes, item_bytes: int) -> bytes | None:
    return None


_digest_each: DigestEach = _by_hashlib_instead


def use_digests(digest_each: DigestEach) -> None:
    """Make the keys of many hashes in this process by this function, which must be SHA-256."""
    global _digest_each
    _digest_each = digest_each


class KeyMaker:
    """Makes keys of one namespace and cache group: SHA-256(namespace id, cache group, block hash).

    The namespace id has a fixed length and the group is fixed width, so the concatenation is unambiguous.
    """

    __slots__ = ("_prefix",)

    def __init__(self, namespace_id: bytes, cache_group: int) -> None:
        self._prefix = b"offloadd.key.v1" + namespace_id + cache_group.to_bytes(4, "little")

    def key(self, block_hash: bytes) -> bytes:
        """The 32-byte key of one block hash."""
        return self.keys((block_hash,))[0]

    def keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """The 32-byte keys of block hashes."""
        packed = self.packed(block_hashes)
        return [packed[first : first + KEY_BYTES] for first in range(0, len(packed), KEY_BYTES)]

    def packed(self, block_hashes: Sequence[bytes]) -> bytes:
        """The keys of block hashes, one after the other. A request has thousands, and this is most of what a lookup costs.

        By hashlib, the digest is the same without `usedforsecurity`, which asks OpenSSL's policy at each call and takes a third of the time; hashing the prefix
        once and copying the state takes longer than hashing it again.
        """
        size_bytes = len(block_hashes[0]) if block_hashes else 0
        if len(set(map(len, block_hashes))) == 1 and (digests := _digest_each(self._prefix, b"".join(block_hashes), size_bytes)) is not None:
            return digests
        prefix, sha256 = self._prefix, hashlib.sha256
        return b"".join([sha256(prefix + block_hash, usedforsecurity=False).digest() for block_hash in block_hashes])
