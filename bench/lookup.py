"""What does a scheduler pay to ask for a long prefix in an index of a million blocks, beyond what any call costs?

The daemon's real front serves over gRPC; its index is filled as a recovery would fill it. Lookups and empty calls alternate, from another process.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.support import sketch
from bench.support.client import NAMESPACE, ClientProcess, block_hash
from bench.support.daemon import DaemonThread, make_config
from bench.support.fakes import add_volume, recover_blocks
from bench.support.report import Figure, Report, Target, benchmark, seconds_figure
from bench.support.stats import Summary
from bench.support.workload import load_workload
from offloadd.catalog.index import keys_array
from offloadd.model.namespace import KeyMaker
from offloadd.units import KIB

BLOCK_BYTES = 640 * KIB
#: Calls of one kind in a row.
TURN = 10
#: Hashing a block hash to its key, parsing and packing it, and finding it: 0.7 µs of SHA-256, 0.4 of index, as much again for Python around them.
KEY_S = 1.8e-6


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`key_count` hashes a call in an index of `entry_count`."""

    name: str
    entry_count: int
    key_count: int
    round_count: int


def fill(front: DaemonThread, work: Work, tenant: str) -> None:
    """Enter the blocks under the keys that the engine will ask for."""
    entry = front.daemon.offload.core.namespaces.enter(replace(NAMESPACE, tenant=tenant).id())
    maker = KeyMaker(entry.namespace_id, 0)
    keys = keys_array([maker.key(block_hash(number)) for number in range(work.entry_count)])
    catalog = front.daemon.offload.core.catalog

    def enter() -> None:
        add_volume(catalog, slab_count=work.entry_count // 1000 + 1)
        recover_blocks(catalog, 0, keys, payload_bytes=BLOCK_BYTES, namespace=entry.number)

    front.call(enter)


def measure(report: Report, work: Work) -> None:
    """Alternate empty calls, lookups that find everything, and lookups that find nothing."""
    with tempfile.TemporaryDirectory(prefix="offloadd-bench-") as directory:
        config = make_config(Path(directory), index_bytes_max=max(1 << 22, work.entry_count * 150))
        with DaemonThread(config) as front, ClientProcess(Path(directory), "bench") as engine:
            fill(front, work, engine.tenant)
            engine.ask("register", block_bytes=4096, block_count=16, fill=False)
            held = front.call(lambda: front.daemon.offload.core.catalog.block_count)
            report.facts["index_blocks"] = held
            report.say(f"{held:,} blocks in the index")
            found: dict[str, list[float]] = {"empty": [], "call": [], "hit": [], "miss": [], "membership": []}
            span = work.entry_count - work.key_count
            for turn in range(-1, work.round_count // TURN):
                firsts = [(turn * TURN + number) * 7919 % span for number in range(TURN)]
                times = {
                    "empty": engine.ask("empty", rounds=TURN),
                    "call": engine.ask("lookup_call", firsts=firsts, count=work.key_count),
                    "hit": engine.ask("lookup", firsts=firsts, count=work.key_count),
                    "miss": engine.ask("lookup", firsts=[first + work.entry_count for first in firsts], count=work.key_count),
                    "membership": engine.ask("lookup", firsts=firsts, count=work.key_count, membership=True),
                }
                if (times["hit"]["held_count"], times["miss"]["held_count"]) != (TURN * work.key_count, 0):
                    raise RuntimeError(f"lookups found {times['hit']['held_count']} of {TURN * work.key_count}, and {times['miss']['held_count']} of none")
                if turn >= 0:
                    for name, answer in times.items():
                        found[name] += answer["seconds"]
    tell(report, work, {name: Summary.of(values) for name, values in found.items()})


def tell(report: Report, work: Work, found: dict[str, Summary]) -> None:
    """The figures."""
    empty = found["empty"]
    report.add(seconds_figure("an empty call", empty, expected=sketch.CALL_S))
    titles = {
        "call": "all held, the call alone",
        "hit": "all held, through the client library",
        "miss": "none held, through the client library",
        "membership": "membership, all held, through the client library",
    }
    for name, title in titles.items():
        summary = found[name]
        report.add(
            seconds_figure(
                f"lookup of {work.key_count} of {work.entry_count:,}, {title}",
                summary,
                expected=sketch.CALL_S + work.key_count * KEY_S,
                sketch="call + keys × (hash, find)",
                target_s=empty.median + 1e-3 if name in ("call", "hit") else None,
            )
        )
    extra = found["call"].median - empty.median
    report.add(Figure("beyond an empty call, a key", extra / work.key_count * 1e6, "µs", KEY_S * 1e6, target=Target(1000 / work.key_count, at_least=False)))


def main() -> None:
    """Run it."""
    with benchmark("lookup", "What does looking up a long prefix among a million blocks cost beyond an empty call?") as report:
        measure(report, load_workload(Work, "lookup_1m", tiny=report.tiny))


if __name__ == "__main__":
    main()
