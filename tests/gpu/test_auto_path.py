"""AUTO takes the path that was measured faster, for each GPU and volume; what goes wrong while they are measured costs that way and no other."""

import errno
import os
import re
from collections.abc import Callable
from urllib.request import urlopen

import pytest

from offloadd.model.enums import Path
from offloadd.offload.measure import SLOT_BYTES
from offloadd.tiers.format import SLOT_MAGIC
from offloadd.tiers.scratch import PROBE_BYTES, Scratch
from offloadd.tiers.volume_summary import read_volume
from offloadd.units import KIB, MIB
from offloadd.v1 import offload_pb2

from ..standin.block import CufileMode
from ..standin.controls import Control, Fault, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node, gds_capability, settled_gds
from .daemon_with import command

COUNT, BLOCK_BYTES = 12, 640 * KIB
SHAPE = {"block_count": 2 * COUNT, "memory_bytes": [2 * COUNT * BLOCK_BYTES], "planes": [(0, 0, BLOCK_BYTES, BLOCK_BYTES)]}
#: Longer than blocks take by a path that nobody slows down, be it that the GPU's kernels run on a busy CPU.
SLOW_US = 400_000
#: Tables of 5 MiB, seven slabs, and a scratch area of 4 MiB: little to measure with.
SMALL = (5 + 7 * 16 + 4) * MIB
#: Where rounds follow each other until the test has seen what it waits for, it needs no best of three, and no means over rounds.
ONCE = command(measure__REPEATS=1, measure__MEASUREMENT_WEIGHT=1)
FIELDS = ("restore", "restore_small", "evict", "evict_small")


def rates(daemon: DaemonProcess, path: str, device: str = "cuda:0") -> offload_pb2.VolumeRates:
    (one,) = gds_capability(daemon, device, Path[path]).volumes
    return one


def all_go_by(daemon: DaemonProcess, path: str) -> bool:
    return all(getattr(rates(daemon, path), f"{name}_auto") for name in FIELDS)


def goes_by(engine: Child, name: str) -> list[list[object]]:
    """Blocks are evicted and restored, right, by paths that AUTO chose; which they were."""
    evicted, restored, wrong = engine.run(f"""
        half = {COUNT}
        names = [f"{name} {{number}}" for number in range(half)]
        for number, name in enumerate(names):
            engine.write(number, name)
        evicted = engine.evict(range(half), names, durable=True)
        restored = engine.restore(range(half, 2 * half), names)
        result = [evicted, restored, engine.wrong(range(half, 2 * half), names)]
    """)
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"} and wrong == []
    return [evicted["paths"], restored["paths"]]


def by(path: str) -> list[list[object]]:
    return [[["VOLUME", path, COUNT]], [["VOLUME", path, COUNT]]]


def control_of(node: Node) -> Control:
    assert node.control is not None
    return node.control


def wait_for_note(daemon: DaemonProcess, text: str, path: str = "GDS") -> None:
    daemon.wait_until(lambda: text in rates(daemon, path).note, f"a note of {text!r}", timeout_s=120)


def test_auto_takes_what_was_measured_faster_and_turns_when_that_changes(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    slow = [control.delay(call, SLOW_US) for call in ("cuFileRead", "cuFileWrite")]
    daemon = standin_node.daemon(volume_bytes=SMALL, measure_interval_s=0.1, command=ONCE)
    assert settled_gds(daemon) == (True, "")
    daemon.wait_until(lambda: all_go_by(daemon, "BOUNCE"), "bounce taken", timeout_s=120)
    assert all(getattr(rates(daemon, path), f"{name}_bytes_per_s") > 0 for path in ("BOUNCE", "GDS") for name in FIELDS)
    # Nothing of it is a block, and nothing was moved for a client.
    assert daemon.status().block_count == 0 and not [name for name in daemon.counters() if name.startswith("offloadd_b")]
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert goes_by(engine, "first") == by("BOUNCE")
    for fault in slow:
        fault.clear()
    control.delay("long host copy", SLOW_US)
    daemon.wait_until(lambda: all_go_by(daemon, "GDS"), "gds taken", timeout_s=120)
    assert goes_by(engine, "second") == by("GDS")
    turned = [line for line in daemon.log.read_text().splitlines() if "auto takes another path" in line]
    assert turned and "path=gds" in turned[-1] and "before=bounce" in turned[-1]
    assert any(name.startswith("auto_restore_turned_to_gds") for name in daemon.counters())


def test_without_a_scratch_area_nothing_is_written_and_nothing_measured(standin_node: Node, make_engine: Callable[..., None]) -> None:
    # Tables of 5 MiB and seven slabs: nothing is over.
    daemon = standin_node.daemon(volume_bytes=(5 + 7 * 16) * MIB)
    assert read_volume(str(daemon.volumes[0])).geometry.scratch_bytes == 0
    assert settled_gds(daemon) == (True, "")
    assert "0 bytes of scratch area" in rates(daemon, "GDS").note
    counters = standin_node.mover(daemon).counters
    assert (counters.cufile_writes, counters.cufile_reads) == (0, 1)
    assert all_go_by(daemon, "BOUNCE")
    (url,) = re.findall(r"metrics=(http\S+)", daemon.log.read_text())
    labels = f'{{gpu="cuda:0",operation="evict",path="%s",size="small",volume="{daemon.volumes[0]}"}}'
    shown = [f"offloadd_route_auto{labels % path} {value}" for path, value in (("bounce", "1.0"), ("gds", "0.0"))]
    daemon.wait_until(lambda: set(shown) <= set(urlopen(url).read().decode().splitlines()), "the metrics")
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert goes_by(engine, "block") == by("BOUNCE")


def test_a_way_that_fails_while_measured_is_left_until_it_goes_again(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    control.delay("long host copy", SLOW_US)
    daemon = standin_node.daemon(volume_bytes=SMALL, measure_interval_s=0.1, command=ONCE)
    daemon.wait_until(lambda: all_go_by(daemon, "GDS"), "gds taken", timeout_s=120)
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    with control.fail("cuFileRead", errno.EIO):
        wait_for_note(daemon, "gave IO_ERROR")
        assert all_go_by(daemon, "BOUNCE")
        assert goes_by(engine, "failing") == by("BOUNCE")
    daemon.wait_until(lambda: all_go_by(daemon, "GDS"), "gds taken again", timeout_s=120)
    control.cufile_mode = CufileMode.COMPAT
    wait_for_note(daemon, "gave WRONG_PATH")
    assert all_go_by(daemon, "BOUNCE") and rates(daemon, "GDS").available


def test_bytes_of_a_request_that_bounced_are_no_measurement_of_gds(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    slow = control.delay("long host copy", SLOW_US)
    daemon = standin_node.daemon(volume_bytes=SMALL)
    assert settled_gds(daemon) == (True, "")
    daemon.wait_until(lambda: all_go_by(daemon, "GDS"), "gds taken", timeout_s=120)
    slow.clear()
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    control.cufile_mode = CufileMode.COMPAT
    evicted, restored = goes_by(engine, "bounced")
    # The first one still went where gds had been; from then on the other way is taken, and this one has no rate to its name.
    assert evicted == restored == [["VOLUME", "BOUNCE", COUNT]]
    assert all_go_by(daemon, "BOUNCE") and rates(daemon, "GDS").evict_bytes_per_s == 0
    assert "passed the host" in rates(daemon, "GDS").note


def test_a_volume_that_hangs_while_measured_costs_that_way_only(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    # The probe's write passes.
    with control.hang("cuFileWrite", skip=1) as fault:
        daemon = standin_node.daemon(volume_bytes=SMALL, measure_interval_s=0.1, command=ONCE)
        wait_until(lambda: fault.waiting_now > 0, "a measurement that hangs")
        engine = standin_node.engine()
        make_engine(engine, daemon, **SHAPE)
        assert goes_by(engine, "meanwhile") == by("BOUNCE")
        wait_for_note(daemon, "did not end")
        assert all_go_by(daemon, "BOUNCE") and rates(daemon, "GDS").available
        assert goes_by(engine, "hanging") == by("BOUNCE")
        # What hangs may still write to the scratch area: nothing else is measured there.
        assert fault.waiting_now == 1
    daemon.wait_until(lambda: rates(daemon, "GDS").evict_bytes_per_s > 0 and not rates(daemon, "GDS").note, "a measurement", timeout_s=120)


def test_wrong_bytes_of_a_measurement_refuse_the_way(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    daemon = standin_node.daemon(volume_bytes=SMALL, measure_interval_s=0.1, command=ONCE)
    assert settled_gds(daemon) == (True, "")
    at = read_volume(str(daemon.volumes[0])).geometry.scratch_offset + PROBE_BYTES
    # Again where the machine was so slow that the measurement was given up meanwhile.
    while rates(daemon, "GDS").available:
        with control.hang("cuFileRead", times=1) as fault:
            wait_until(lambda: fault.waiting_now == 1, "a restore of a measurement")
            with daemon.volumes[0].open("r+b") as file:
                file.seek(at + 100_000)
                file.write(bytes(64))
                file.flush()
                os.fsync(file.fileno())
        before = standin_node.mover(daemon).counters.cufile_reads
        daemon.wait_until(
            lambda: not rates(daemon, "GDS").available or standin_node.mover(daemon).counters.cufile_reads > before + 1,  # noqa: B023
            "what came of it",
            timeout_s=120,
        )
    assert "CHECKSUM_MISMATCH" in rates(daemon, "GDS").note and all_go_by(daemon, "BOUNCE")
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert goes_by(engine, "block") == by("BOUNCE")
    with pytest.raises(RuntimeError, match=r"path gds is not available: gds, measured: restore of \d+ blocks gave CHECKSUM_MISMATCH"):
        engine.run("engine.restore(range(half, 2 * half), names, path='GDS', require_path=True)")


def test_two_gpus_measure_in_parts_of_one_scratch_area(standin_node: Node) -> None:
    # 32 MiB of scratch area are over.
    daemon = standin_node.daemon(gpus=("cuda:0", "cuda:1"), volume_bytes=(5 + 7 * 16) * MIB, slab_bytes=80 * MIB)
    for device in ("cuda:0", "cuda:1"):
        daemon.wait_until(lambda: all(getattr(rates(daemon, "GDS", device), f"{name}_bytes_per_s") for name in FIELDS), f"{device} measured", timeout_s=120)  # noqa: B023
        daemon.wait_until(lambda: rates(daemon, "GDS", device).note == "", f"{device} measured to the end", timeout_s=120)  # noqa: B023
    geometry = read_volume(str(daemon.volumes[0])).geometry
    content = daemon.volumes[0].read_bytes()
    whole = Scratch(geometry.scratch_offset, geometry.scratch_bytes)
    assert whole.size_bytes == 32 * MIB
    for index in range(2):
        part = whole.part(index, 2)
        assert any(content[part.offset : part.offset + PROBE_BYTES]), "the probe wrote elsewhere"
        slots = [content[(at := part.slot_offset(slot, slot, SLOT_BYTES)) : at + 8] for slot in range(part.slot_count(SLOT_BYTES))]
        assert len(slots) == 23 and set(slots) == {SLOT_MAGIC}
    assert not any(content[whole.offset + whole.size_bytes - MIB // 2 : geometry.data_offset])
    assert not any(content[geometry.data_offset :]), "a measurement left the scratch area"


def killed_while_measured(node: Node, daemon: DaemonProcess, fault: Fault) -> None:
    """The mover whose call hangs is killed, and another one is there."""
    wait_until(lambda: fault.waiting_now == 1, "a measurement")
    mover = node.mover(daemon)
    daemon.kill_worker("mover cuda:0")
    node.mover(daemon, after=mover)
    fault.clear()


def test_a_mover_that_dies_while_measured_is_measured_again_but_not_for_ever(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    # The writes of the probes pass.
    first = control.hang("cuFileWrite", skip=1, times=1)
    daemon = standin_node.daemon(volume_bytes=SMALL)
    wait_until(lambda: first.waiting_now == 1, "a measurement")
    second = control.hang("cuFileWrite", skip=1, times=1)
    killed_while_measured(standin_node, daemon, first)
    killed_while_measured(standin_node, daemon, second)
    wait_for_note(daemon, "2 movers did, so it is not measured again")
    daemon.wait_until(lambda: rates(daemon, "GDS").available, "the gds lane", timeout_s=120)
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert goes_by(engine, "block") == by("BOUNCE")


def test_a_mover_that_died_once_while_measured_is_measured_then(standin_node: Node) -> None:
    fault = control_of(standin_node).hang("cuFileWrite", skip=1, times=1)
    daemon = standin_node.daemon(volume_bytes=SMALL)
    killed_while_measured(standin_node, daemon, fault)
    daemon.wait_until(lambda: rates(daemon, "GDS").evict_bytes_per_s > 0 and not rates(daemon, "GDS").note, "a measurement", timeout_s=120)
