"""The main job: requests that a real engine preempts leave through the daemon, come back into other blocks, and answer as if nothing had happened."""

import signal
from collections.abc import Callable

import pytest

from offloadd.client import Client, EvictStatus, Path, RestoreStatus, Tier

from .daemon_process import DaemonProcess
from .swap import THROUGH_ARENA, THROUGH_VOLUME, Swap, Way

pytestmark = pytest.mark.engine

Generate = Callable[[Swap], list[list[int]]]


def check_against_daemon(swap: Swap, daemon: DaemonProcess, tier: Tier, path: Path) -> None:
    """The blocks really went that way, both ways, and the daemon counts what the engine saw."""
    stored = swap.evicted[EvictStatus.STORED, tier]
    duplicate = sum(count for (status, _), count in swap.evicted.items() if status is EvictStatus.DUPLICATE)
    restored = swap.restored[RestoreStatus.RESTORED, tier]
    assert stored > 0
    assert restored > 0
    assert stored + duplicate == swap.evicted.total() == sum(len(one.keys) for one in swap.preemptions)
    assert restored == swap.restored.total() == swap.evicted.total()
    assert swap.evict_uses == {(tier, path): stored}
    assert swap.restore_uses == {(tier, path): restored}
    counters = daemon.counters()
    name, way = tier.name.lower(), path.name.lower()
    block_bytes = swap.region.payload_bytes
    assert counters[f'offloadd_blocks_total{{operation="evict",outcome="stored",tier="{name}"}}'] == stored
    assert counters['offloadd_blocks_total{operation="evict",outcome="duplicate",tier="any"}'] == duplicate
    assert counters[f'offloadd_blocks_total{{operation="restore",outcome="restored",tier="{name}"}}'] == restored
    assert counters[f'offloadd_bytes_total{{operation="evict",tier="{name}",path="{way}",way="plain"}}'] == stored * block_bytes
    assert counters[f'offloadd_bytes_total{{operation="restore",tier="{name}",path="{way}",way="plain"}}'] == restored * block_bytes


def check_preemptions(swap: Swap) -> None:
    """The run was one that could have gone wrong."""
    assert len(swap.preemptions) >= 5
    assert all(one.resumed for one in swap.preemptions)
    assert any(one.has_tail for one in swap.preemptions), "no partial tail was evicted"
    assert any(one.sources != one.targets for one in swap.preemptions), "every block came back to its old place"
    assert len({one.request_id for one in swap.preemptions}) < len(swap.preemptions), "no request was preempted twice"
    assert swap.changed_blocks == 0


def test_the_answers_to_compare_with_are_worth_comparing_with(undisturbed_tokens: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in undisturbed_tokens}) == len(undisturbed_tokens) == 12
    # Broken KV would not show in requests that repeat one token whatever they read.
    assert min(len(set(tokens)) for tokens in undisturbed_tokens) >= 10


@pytest.mark.parametrize(("way", "tier", "path"), [(THROUGH_ARENA, Tier.ARENA, Path.DDR), (THROUGH_VOLUME, Tier.VOLUME, Path.HOST)], ids=["arena", "volume"])
def test_preempted_requests_answer_as_if_undisturbed(
    daemon: DaemonProcess,
    client: Client,
    generate_preempted: Generate,
    undisturbed_tokens: list[list[int]],
    way: Way,
    tier: Tier,
    path: Path,
) -> None:
    swap = Swap(client, way)
    assert generate_preempted(swap) == undisturbed_tokens
    check_preemptions(swap)
    check_against_daemon(swap, daemon, tier, path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_requests_preempted_before_a_restart_resume_after_it(
    daemon: DaemonProcess,
    client: Client,
    generate_preempted: Generate,
    undisturbed_tokens: list[list[int]],
    number: signal.Signals,
) -> None:
    def restart() -> None:
        if number == signal.SIGTERM:
            daemon.stop()
        else:
            daemon.kill()
        daemon.start()

    swap = Swap(client, THROUGH_VOLUME, before_first_restore=restart, daemon_life=lambda: daemon.start_count)
    assert generate_preempted(swap) == undisturbed_tokens
    assert daemon.start_count == 2
    survivors = [one for one in swap.preemptions if one.evict_life != one.restore_life]
    assert sum(len(one.keys) for one in survivors) > 0, "nothing was restored that had been evicted before the restart"
    check_preemptions(swap)
    check_against_daemon(swap, daemon, Tier.VOLUME, Path.HOST)
