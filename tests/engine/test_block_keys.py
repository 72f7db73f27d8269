"""The names that the engine's blocks have."""

from .block_keys import block_keys


def test_equal_prefixes_have_equal_names_and_nothing_after_a_difference_has() -> None:
    tokens = list(range(100))
    other = [*tokens[:40], 999, *tokens[41:]]
    same = [mine == theirs for mine, theirs in zip(block_keys(tokens, 32), block_keys(other, 32), strict=True)]
    assert same == [True, False, False, False]


def test_a_tail_is_named_by_its_length_and_never_as_a_full_block() -> None:
    names = [block_keys([7] * count, 32)[-1] for count in range(1, 33)]
    names += block_keys([7] * 32, 31)[:1]
    assert len(set(names)) == 33


def test_each_block_has_one_name() -> None:
    assert [len(block_keys(range(count), 32)) for count in (0, 1, 32, 33, 64)] == [0, 1, 1, 2, 2]
