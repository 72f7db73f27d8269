"""A GPU that can't be used yet, that is shared by MPS, or that is named twice: what is told, what is served, and that it comes up without a restart."""

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.cli.status import values_of
from offloadd.config.schema import GpuConfig
from offloadd.units import MIB
from offloadd.v1 import offload_pb2 as pb

from ..standin.block import ComputeMode
from ..standin.controls import wait_until
from ..system.daemon_process import DaemonProcess
from .conftest import Node
from .daemon_with import command
from .test_gpu_faults import OUT_OF_MEMORY, SHAPE, control_of, restores, works

UUID = "GPU-7374616e-6469-6e2d-6770-750000000000"
#: What the stand-in says that a context takes.
CONTEXT_BYTES = 300 * MIB


def usable(daemon: DaemonProcess, gpu: str = "cuda:0") -> set[str]:
    """Paths of the GPU that are available."""
    return {pb.Path.Name(way.path).removeprefix("PATH_") for way in daemon.status().paths if way.device == gpu and way.available}


def metric(daemon: DaemonProcess, name: str) -> float | None:
    url = re.search(r"metrics=(http\S+)", daemon.log.read_text())
    assert url is not None
    with urllib.request.urlopen(url[1], timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"offloadd_{name}")), None)


# ---- out of memory at start, and free later ----


def test_a_gpu_that_was_out_of_memory_at_start_is_served_once_it_is_free(standin_node: Node, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    full = control_of(standin_node).fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY)
    daemon = standin_node.daemon()
    front = daemon.status().pid
    engine.run(f"""
        client = Client.connect({str(daemon.runtime_dir)!r}, instance="early", timeout_s=60)
        memory = export_pointer(int(ok(cu.cuMemAlloc(4096))), 4096)

        def register():
            return Request(lambda: client.register_region(
                block_count=1, planes=[Plane(0, 0, 4096, 4096)], memories=[memory], namespace=Namespace(model="m", weights="w")
            )).finish()
    """)
    # At start and after each of two pauses; an engine hears the same cause before, between and after.
    for tries in (1, 2, 3):
        wait_until(lambda tries=tries: full.hits >= tries, "another try")
        kind, message = engine.run("result = register()['error']")
        assert kind == "PathUnavailable" and "CUDA_ERROR_OUT_OF_MEMORY" in message
        assert usable(daemon) == set()
    assert metric(daemon, 'gpu_usable{gpu="cuda:0"}') == 0
    (told,) = values_of(daemon.status())["gpus"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told["note"] and told["uuid"] == "" and told["context_bytes"] == 0
    full.clear()
    daemon.wait_until(lambda: usable(daemon) == {"DDR", "BOUNCE", "GDS"}, "the GPU's paths", timeout_s=120)
    # The session of the engine that was refused, and another's.
    assert engine.run("result = hasattr(register(), 'region_id')")
    make_engine(engine, daemon, **SHAPE)
    works(engine)
    assert restores(engine, "path='BOUNCE', require_path=True") == [["VOLUME", "BOUNCE", 8]]
    log = daemon.log.read_text()
    assert log.count("the device can't be used") == 1, "a try that changed nothing was logged"
    assert "worker died" not in log
    assert daemon.status().pid == front
    assert {worker.name: worker.restart_count for worker in daemon.status().workers}["mover cuda:0"] == 0


def test_a_mover_that_finds_its_gpu_full_after_it_died_comes_back_with_its_regions(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine = standin_node.daemon(), standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    works(engine)
    before = standin_node.mover(daemon)
    with control_of(standin_node).fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY) as full:
        daemon.kill_worker("mover cuda:0")
        wait_until(lambda: full.hits >= 2, "another try")
        outcomes = engine.run("result = engine.restore(range(8, 16), names, deadline_s=5.0)['outcomes']")
        assert {outcome[0] for outcome in outcomes} == {"FAILED"}
    after = standin_node.mover(daemon, after=before)
    wait_until(lambda: after.counters.memory_handles_open_now == 1, "the region's mapping")
    daemon.wait_until(lambda: "BOUNCE" in usable(daemon), "the way")
    restores(engine)
    # That it died is counted, and the tries after it are not.
    daemon.wait_until(lambda: metric(daemon, 'workers_restarted_total{worker="mover cuda:0"}') == 1, "the count of its restart")


# ---- a driver that hangs ----


def test_a_mover_whose_driver_hangs_is_killed_and_another_one_tries_again(standin_node: Node, make_engine: Callable[..., None]) -> None:
    # A mover that is as slow as that on a busy machine is taken when it answers in the pause, or tried again.
    with control_of(standin_node).hang("cuInit", times=1) as fault:
        daemon = standin_node.daemon(command=command(mover_link__HELLO_TIMEOUT_S=3, mover_link__RETRY_PAUSE_S=1))
        hung = next(one.pid for one in control_of(standin_node) if one.calls.get("cuInit"))
        daemon.wait_until(lambda: "its driver has not answered within 3 s" in daemon.log.read_text(), "the cause", timeout_s=120)
        daemon.wait_until(lambda: "BOUNCE" in usable(daemon), "the GPU", timeout_s=120)
        assert fault.hits == 1 and daemon.worker_pid("mover cuda:0") != hung
        wait_until(lambda: not alive(hung), "its end")
        engine = standin_node.engine()
        make_engine(engine, daemon, **SHAPE)
        works(engine)
    assert "worker died" not in daemon.log.read_text()


def test_a_driver_that_answers_late_is_taken(standin_node: Node, make_engine: Callable[..., None]) -> None:
    with control_of(standin_node).hang("cuInit", times=1):
        daemon = standin_node.daemon(command=command(mover_link__HELLO_TIMEOUT_S=3, mover_link__RETRY_PAUSE_S=3600))
        slow = daemon.worker_pid("mover cuda:0")
        daemon.wait_until(lambda: "its driver has not answered within 3 s" in daemon.log.read_text(), "the cause", timeout_s=120)
        assert usable(daemon) == set()
        (note,) = {way.note for way in daemon.status().paths if way.device == "cuda:0"}
        assert "nvidia-persistenced" in note
    daemon.wait_until(lambda: "BOUNCE" in usable(daemon), "the GPU", timeout_s=120)
    assert daemon.worker_pid("mover cuda:0") == slow
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    works(engine)


# ---- MPS ----


def test_an_exclusive_gpu_is_served_beside_an_engine_where_mps_serves_it(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control = control_of(standin_node)
    control.compute_mode = ComputeMode.EXCLUSIVE_PROCESS
    control.mps = True
    engine, daemon = standin_node.engine(), standin_node.daemon()
    (gpu,) = values_of(daemon.status())["gpus"]
    assert gpu == {
        "device": "cuda:0",
        "uuid": UUID,
        "name": "Stand-in GPU",
        "pci_bus_id": "0000:10:00.0",
        "compute_mode": "EXCLUSIVE_PROCESS",
        "uses_mps": True,
        "context_bytes": CONTEXT_BYTES,
        "note": "",
    }
    make_engine(engine, daemon, **SHAPE)
    works(engine)
    daemon.wait_until(lambda: metric(daemon, 'gpu_context_bytes{gpu="cuda:0"}') == CONTEXT_BYTES, "the metric")


def test_an_exclusive_gpu_is_refused_without_mps_and_served_once_it_runs(standin_node: Node) -> None:
    control = control_of(standin_node)
    control.compute_mode = ComputeMode.EXCLUSIVE_PROCESS
    daemon = standin_node.daemon()
    (note,) = {way.note for way in daemon.status().paths if way.device == "cuda:0"}
    assert all(text in note for text in ("EXCLUSIVE_PROCESS", "MPS does not serve it", "nvidia-smi -c DEFAULT", "nvidia-cuda-mps-control -d"))
    control.mps = True
    daemon.wait_until(lambda: "DDR" in usable(daemon), "the GPU", timeout_s=120)
    assert values_of(daemon.status())["gpus"][0]["uses_mps"]


def test_a_machine_without_the_management_library_is_served_and_the_context_is_not_known(standin_node: Node, make_engine: Callable[..., None]) -> None:
    control_of(standin_node).fail("nvmlInit", 9)
    engine, daemon = standin_node.engine(), standin_node.daemon()
    (gpu,) = values_of(daemon.status())["gpus"]
    assert (gpu["compute_mode"], gpu["uses_mps"], gpu["context_bytes"], gpu["note"]) == ("DEFAULT", False, 0, "")
    make_engine(engine, daemon, **SHAPE)
    works(engine)


# ---- one GPU under two names ----


def test_a_gpu_that_is_named_twice_is_served_once_and_the_other_name_says_so(standin_node: Node, make_engine: Callable[..., None]) -> None:
    engine, second = standin_node.engine(), standin_node.engine(ordinal=1)
    daemon = standin_node.daemon(gpus=("cuda:0", UUID, "cuda:1"))
    gpus = {gpu["device"]: gpu for gpu in values_of(daemon.status())["gpus"]}
    (refused,) = [name for name, gpu in gpus.items() if gpu["note"]]
    (served,) = {"cuda:0", UUID} - {refused}
    assert f"{refused} is the same GPU as {served} ({UUID})" in gpus[refused]["note"] and "gpu.devices" in gpus[refused]["note"]
    assert {way.note for way in daemon.status().paths if way.device == refused} == {gpus[refused]["note"]}
    # One context of a mover, and no process that waits for nothing.
    control = control_of(standin_node)
    workers = {worker.name: worker.pid for worker in daemon.status().workers}
    assert f"mover {refused}" not in workers
    holders = {engine.pid, second.pid, workers[f"mover {served}"], workers["mover cuda:1"]}
    wait_until(lambda: {one.pid for one in control if one.counters.contexts_now and alive(one.pid)} == holders, "the end of the refused mover")
    for one in (engine, second):
        make_engine(one, daemon, **SHAPE, weights=str(one.pid))
        works(one)
    assert daemon.counters().get("faults", 0) == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("second", [UUID.replace("GPU", "MIG"), "GPU-7374616E-6469-6E2D-6770-750000000000"])
def test_two_uuids_of_one_gpu_are_refused_by_the_configuration(second: str) -> None:
    with pytest.raises(ValueError, match="each GPU may stand there once"):
        GpuConfig(devices=(UUID, second))
