"""What verification is for: the same damage under a real engine, without it and with it."""

from collections.abc import Callable

import numpy as np
import pytest

from offloadd.client import Blocks, Client, EvictStatus, Reason, RestoreStatus, Tier

from .daemon_process import SERVE_WITHOUT_VERIFY, DaemonProcess
from .damage import PayloadDamage
from .swap import THROUGH_VOLUME, BlocksNotRestored, Swap

pytestmark = pytest.mark.engine

Generate = Callable[[Swap], list[list[int]]]


@pytest.mark.parametrize("daemon", [SERVE_WITHOUT_VERIFY], indirect=True, ids=["without-verify"])
def test_without_verification_damaged_blocks_change_the_answers(
    daemon: DaemonProcess, client: Client, generate_preempted: Generate, undisturbed_tokens: list[list[int]]
) -> None:
    """The other tests prove something only if wrong bytes would show."""
    damage = PayloadDamage(daemon.volume)
    swap = Swap(client, THROUGH_VOLUME, use_anything=True, after_evict=damage.apply)
    tokens = generate_preempted(swap)
    assert damage.block_count == swap.evicted[EvictStatus.STORED, Tier.VOLUME] > 0
    assert swap.restored == {(RestoreStatus.RESTORED, Tier.VOLUME): swap.changed_blocks}
    assert swap.changed_blocks > 0
    changed = [mine != theirs for mine, theirs in zip(tokens, undisturbed_tokens, strict=True)]
    assert any(changed)
    counters = daemon.counters()
    assert counters['offloadd_blocks_total{operation="restore",outcome="restored",tier="volume"}'] == swap.changed_blocks


def test_damaged_blocks_are_refused_and_leave_engine_memory_as_it_was(daemon: DaemonProcess, client: Client, generate_preempted: Generate) -> None:
    """The engine has no way to compute a swapped request again, so its run ends at the first refusal; the other blocks are asked for afterwards."""
    damage = PayloadDamage(daemon.volume)
    others: dict[str, int] = {}

    def ask_for_the_others(refused: BlocksNotRestored) -> None:
        keys = sorted(set(swap.stored_bytes) - set(refused.keys))
        targets = [index % swap.region.block_count for index in range(len(keys))]
        for target, key in zip(targets, keys, strict=True):
            before = swap.block_bytes([target])
            result = client.restore(Blocks(swap.region, [target], [key]))
            assert [outcome.status for outcome in result.outcomes] == [RestoreStatus.DATA_LOSS]
            assert np.array_equal(swap.block_bytes([target]), before)
        others["count"] = len(keys)

    swap = Swap(client, THROUGH_VOLUME, after_evict=damage.apply, on_refusal=ask_for_the_others)
    with pytest.raises(BlocksNotRestored) as raised:
        generate_preempted(swap)
    refused = raised.value
    assert damage.block_count == swap.evicted[EvictStatus.STORED, Tier.VOLUME] > 0
    assert {(outcome.status, outcome.reason) for outcome in refused.result.outcomes} == {(RestoreStatus.DATA_LOSS, Reason.CHECKSUM_MISMATCH)}
    assert np.array_equal(refused.before, refused.after)
    lost = len(refused.keys) + others["count"]
    assert lost == damage.block_count
    counters = daemon.counters()
    assert sum(count for name, count in counters.items() if 'operation="restore",outcome="data_loss"' in name) == lost
    assert not any('operation="restore",outcome="restored"' in name for name in counters)
