"""The grid from its options to its rows: group by group, each with a daemon of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from bench.grid.cases import Group, Kv, kv_of, plan_groups, plan_recompute
from bench.grid.counters import TrafficCounter, Uncounted, find_counter
from bench.grid.measure import Measurement
from bench.grid.models import load_models
from bench.grid.node import Gpu, Node, Skip
from bench.grid.options import Options
from bench.grid.recompute import load_gpus, recompute_note, recompute_row
from bench.grid.room import SLAB_BYTES, SLAB_BYTES_TINY, HostRoom, gpu_fault, in_flight, volume_fault, volume_need
from bench.grid.volumes import GridVolume, opened
from bench.support.report import Report
from bench.support.rows import Case, Row
from offloadd.errors import InvalidRequest
from offloadd.tiers.format import slot_bytes_for


def run_grid(report: Report, options: Options) -> None:
    """Add every row of the grid to the report, and what holds for all of them to its facts."""
    _GridRun(report, options).run()


class _GridRun:
    def __init__(self, report: Report, options: Options) -> None:
        self._report = report
        self._options = options
        self._models = load_models()
        self._slab_bytes = SLAB_BYTES_TINY if report.tiny else SLAB_BYTES
        self._counter: TrafficCounter | None = None
        self._counter_note = ""

    def run(self) -> None:
        report, options = self._report, self._options
        try:
            self._counter = find_counter()
        except Uncounted as error:
            self._counter_note = str(error)
        report.facts |= options.facts
        report.facts["memory_traffic"] = self._counter.note if self._counter is not None else self._counter_note
        groups = plan_groups(options, self._models)
        for number, group in enumerate(groups):
            where = f"on {group.gpu_count} GPUs" if group.gpu_count else "in host memory"
            report.say(f"grid, part {number + 1} of {len(groups)}: engines {where}, {group.volume_count} volumes, {len(group.cases)} cases")
            for row in self._group(group):
                report.add_row(row)
        self._recompute()

    def _recompute(self) -> None:
        cases = plan_recompute(self._options, self._models)
        if not cases:
            return
        gpus = load_gpus()
        gpu = next(one for one in gpus.gpu if one.name == self._options.recompute_gpu)
        self._report.facts["recompute"] = recompute_note(gpu, gpus.efficiency)
        for case in cases:
            self._report.add_row(recompute_row(case, self._models[case.model], gpu, gpus.efficiency))

    def _group(self, group: Group) -> Iterator[Row]:
        """The rows of a group. Cases that there is no room or no way for come first, with the reason."""
        room = HostRoom.now()
        cases, skipped = _sorted_out(group.cases, room.fault)
        yield from skipped
        if not cases:
            return
        on_volumes = [case for case in cases if case.path != "ddr"]
        volume_bytes = max((volume_need(case, self._slab_bytes) for case in on_volumes), default=4 * self._slab_bytes)
        with ExitStack() as stack:
            try:
                files = opened(self._options.volumes, self._report.directory, count=group.volume_count, volume_bytes=volume_bytes, slab_bytes=self._slab_bytes)
                volumes = stack.enter_context(files)
            except InvalidRequest as error:
                yield from (Row(case, skipped=str(error)) for case in cases)
                return
            node = stack.enter_context(Node(volumes, arena_bytes=room.arena_for(cases), gpu_count=group.gpu_count))
            cases, skipped = _sorted_out(cases, lambda case: node.refusal(case.path))
            yield from skipped
            if not cases:
                return
            try:
                gpus = node.looked_up_gpus()
            except Skip as reason:
                yield from (Row(case, skipped=str(reason)) for case in cases)
                return
            if gpus:
                self._report.facts["gpus"] = ", ".join(gpu.name for gpu in gpus)
            cases, skipped = _sorted_out(cases, _fault_of(volumes, gpus))
            yield from skipped
            yield from self._measured(node, cases)

    def _measured(self, node: Node, cases: Sequence[Case]) -> Iterator[Row]:
        """Cases of the same blocks together, in the order in which they come first: one region for all of them."""
        by_kv: dict[Kv, list[Case]] = {}
        must_fill = True
        for case in cases:
            by_kv.setdefault(kv_of(case, self._models, self._options.layout), []).append(case)
        for kv, some in by_kv.items():
            self._report.say(f"  {kv.model.name} TP{kv.tensor_parallel} {kv.kv_dtype}, {kv.shape.block_bytes / 1024:g} KiB blocks: {len(some)} cases")
            try:
                with node.engines(kv, block_count=max(map(in_flight, some)), scattered=self._options.scattered) as engines:
                    measurement = Measurement(node, engines, rounds=self._options.rounds, counter=self._counter, counter_note=self._counter_note)
                    on_volumes = [case for case in some if case.path != "ddr"]
                    if must_fill and on_volumes:
                        self._report.facts["volumes_filled"] = measurement.fill(max(on_volumes, key=in_flight))
                        must_fill = False
                    for case in some:
                        self._report.say(f"    {case.operation} by {case.path}: {case.tokens:,} tokens, depth {case.queue_depth}")
                        yield measurement.row(case)
            except Skip as reason:
                # The region was refused, or filling the volumes, so that no case has run.
                yield from (Row(case, skipped=str(reason)) for case in some)


def _fault_of(volumes: Sequence[GridVolume], gpus: Sequence[Gpu]) -> Callable[[Case], str]:
    """Why volumes or GPUs have no room for a case; empty if they have."""
    free_bytes = min((gpu.free_bytes for gpu in gpus), default=0)
    slab_bytes = min(volume.geometry.slab_bytes for volume in volumes)

    def fault(case: Case) -> str:
        slots = [volume.slots(slot_bytes_for(case.block_bytes)) for volume in volumes]
        return volume_fault(case, slots, slab_bytes) or (gpu_fault(case, free_bytes) if gpus else "")

    return fault


def _sorted_out(cases: Sequence[Case], fault_of: Callable[[Case], str]) -> tuple[list[Case], list[Row]]:
    """The cases without a fault, and rows of the others."""
    faults = [fault_of(case) for case in cases]
    good = [case for case, fault in zip(cases, faults, strict=True) if not fault]
    return good, [Row(case, skipped=fault) for case, fault in zip(cases, faults, strict=True) if fault]
