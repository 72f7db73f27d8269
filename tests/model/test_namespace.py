"""Two sets of blocks whose bytes may differ never have the same identity."""

import hashlib
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.model import namespace
from offloadd.model.namespace import KeyMaker, Namespace, Shard

BASE = Namespace(tenant="uid:1", model="m", weights="w", block_tokens=16, salt=b"s", extra=(("a", "b"),))


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_each_field_alone_changes_the_identity(name: str) -> None:
    value = getattr(BASE, name)
    other = {str: "x", int: 17, bytes: b"t", tuple: (("a", "c"),), Shard: Shard(layer_count=1)}[type(value)]
    assert replace(BASE, **{name: other}).id() != BASE.id()


@pytest.mark.parametrize("name", [field.name for field in fields(Shard)])
def test_each_part_of_the_shard_alone_changes_the_identity(name: str) -> None:
    assert replace(BASE, shard=replace(BASE.shard, **{name: 3})).id() != BASE.id()


def test_moving_text_from_one_field_to_the_next_changes_the_identity() -> None:
    assert Namespace(model="ab", weights="c").id() != Namespace(model="a", weights="bc").id()
    assert Namespace(model="x").id() != Namespace(weights="x").id()
    assert Namespace(extra=(("ab", "c"),)).id() != Namespace(extra=(("a", "bc"),)).id()
    assert Namespace(extra=(("a", "b"),)).id() != Namespace(extra=(("a", "b"), ("", ""))).id()
    assert Namespace(salt=b"model").id() != Namespace(model="salt").id()


def test_the_order_of_extra_fields_does_not_matter() -> None:
    assert Namespace(extra=(("a", "1"), ("b", "2"))).id() == Namespace(extra=(("b", "2"), ("a", "1"))).id()


TEXTS = st.text(max_size=3)
NAMESPACES = st.builds(Namespace, tenant=TEXTS, model=TEXTS, weights=TEXTS, adapter=TEXTS, salt=st.binary(max_size=3), block_tokens=st.integers(0, 3))


@given(NAMESPACES, NAMESPACES)
def test_equal_identities_mean_equal_fields(first: Namespace, second: Namespace) -> None:
    assert (first.id() == second.id()) == (first == second)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 3), st.binary(min_size=1, max_size=64), st.integers(0, 3))
def test_keys_differ_when_hash_group_or_namespace_do(first: bytes, first_group: int, second: bytes, second_group: int) -> None:
    one, other = BASE.id(), Namespace().id()
    assert (KeyMaker(one, first_group).key(first) == KeyMaker(one, second_group).key(second)) == ((first, first_group) == (second, second_group))
    assert KeyMaker(one, first_group).key(first) != KeyMaker(other, first_group).key(first)


def test_the_key_is_the_documented_digest() -> None:
    prefix = b"offloadd.key.v1" + BASE.id() + (7).to_bytes(4, "little")
    assert KeyMaker(BASE.id(), 7).keys([b"x", b"yy"]) == [hashlib.sha256(prefix + name).digest() for name in (b"x", b"yy")]


@pytest.mark.parametrize("block_hashes", [[], [b"x"], [b"x" * 32, b"y" * 32, b"z" * 32], [b"x" * 31, b"y" * 33]])
@pytest.mark.parametrize("can", [True, False])
def test_packed_keys_are_the_keys_by_whatever_function_makes_them(monkeypatch, block_hashes, can):
    asked = []

    def digests(prefix, items, item_bytes):
        asked.append(item_bytes)
        if not can:
            return None
        return b"".join(hashlib.sha256(prefix + items[at : at + item_bytes]).digest() for at in range(0, len(items), item_bytes))

    monkeypatch.setattr(namespace, "_digest_each", digests)
    maker = KeyMaker(BASE.id(), 7)
    prefix = b"offloadd.key.v1" + BASE.id() + (7).to_bytes(4, "little")
    want = [hashlib.sha256(prefix + name).digest() for name in block_hashes]
    assert maker.packed(block_hashes) == b"".join(want) and maker.keys(block_hashes) == want
    # Hashes of different lengths, though as many bytes together, are not items of one length.
    assert set(asked) == ({len(block_hashes[0])} if len({len(name) for name in block_hashes}) == 1 else set())
