"""What does a scheduler pay to ask for a long prefix in an index of a million blocks, beyond what any call costs?

A real daemon recovers a volume of so many blocks (a sparse file with slab summaries only). Lookups and empty calls alternate, from another process.
"""

import math
import os
from dataclasses import replace

import msgspec

from bench.support import sketch
from bench.support.client import NAMESPACE, ClientProcess, block_hash
from bench.support.full_volume import make_full_volume
from bench.support.report import Figure, Report, Target, benchmark, seconds_figure
from bench.support.service import Service
from bench.support.stats import Summary
from bench.support.workload import load_workload
from offloadd.catalog.index import Keys, keys_array
from offloadd.model.namespace import KeyMaker
from offloadd.tiers.format import slot_bytes_for, slot_count_for
from offloadd.units import GIB, KIB, MIB

BLOCK_BYTES = 640 * KIB
#: Blocks from this number on were never stored.
NOBODY = 1 << 40
#: Calls of one kind in a row: the first ones after the engine made its requests find caches and processors cold.
TURN = 50
#: Hashing a block hash to its key, parsing and packing it, and finding it: 0.7 µs of SHA-256, 0.4 of index, as much again for Python around them.
KEY_S = 1.8e-6


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`key_count` hashes a call in an index of `entry_count` blocks at least: whole slabs of 1 GiB."""

    name: str
    entry_count: int
    key_count: int
    round_count: int


def measure(report: Report, work: Work) -> None:
    """Alternate empty calls, lookups that find everything, and lookups that find nothing."""
    slots = slot_count_for(GIB, slot_bytes_for(BLOCK_BYTES))
    # What the daemon will take this process's children for.
    maker = KeyMaker(replace(NAMESPACE, tenant=f"uid:{os.geteuid()}").id(), 0)

    def keys_of(count: int, slab: int) -> Keys:
        return keys_array([maker.key(block_hash(slab * slots + number)) for number in range(count)])

    path = report.directory / "lookup.volume"
    report.say(f"making a volume of {math.ceil(work.entry_count / slots)} slabs")
    held = make_full_volume(path, slab_count=math.ceil(work.entry_count / slots), slab_bytes=GIB, block_bytes=BLOCK_BYTES, dirty_count=0, keys_of=keys_of)
    try:
        with Service(volumes=[path], open_slabs=8, index_bytes_max=max(4 * MIB, held * 160)) as service:
            service.ready_s()
            service.event("volume is recovered")
            report.facts["index_blocks"] = held
            report.say(f"{held:,} blocks in the index")
            with ClientProcess(service.runtime_dir, "bench") as engine:
                found = ask(engine, work)
    finally:
        path.unlink()
    tell(report, work, {name: Summary.of(values) for name, values in found.items()})


def ask(engine: ClientProcess, work: Work) -> dict[str, list[float]]:
    """Seconds of each call, by kind."""
    engine.ask("register", block_bytes=4096, block_count=16, fill=False)
    found: dict[str, list[float]] = {"empty": [], "call": [], "hit": [], "miss": [], "membership": []}
    span = work.entry_count - work.key_count
    for turn in range(-1, work.round_count // TURN):
        firsts = [(turn * TURN + number) * 7919 % span for number in range(TURN)]
        times = {
            "empty": engine.ask("empty", rounds=TURN),
            "call": engine.ask("lookup_call", firsts=firsts, count=work.key_count),
            "hit": engine.ask("lookup", firsts=firsts, count=work.key_count),
            "miss": engine.ask("lookup", firsts=[first + NOBODY for first in firsts], count=work.key_count),
            "membership": engine.ask("lookup", firsts=firsts, count=work.key_count, membership=True),
        }
        if (times["hit"]["held_count"], times["miss"]["held_count"]) != (TURN * work.key_count, 0):
            raise RuntimeError(f"lookups found {times['hit']['held_count']} of {TURN * work.key_count}, and {times['miss']['held_count']} of none")
        if turn >= 0:
            for name, answer in times.items():
                found[name] += answer["seconds"]
    return found


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
