"""One daemon with its volumes and the engines that it serves: what the cases of a group run on."""

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.grid.cases import Kv
from bench.grid.volumes import GridVolume
from bench.support.client import ClientProcess
from bench.support.cpu import children_of, cpu_seconds
from bench.support.service import Service
from bench.support.settled import SETTLE_TIMEOUT_S, settled_paths
from offloadd.client import AdminClient, Client, PathCapability
from offloadd.units import GIB

ENGINE_MODULE = "bench.grid.engine"
HOST_DEVICE = "host"


class Skip(Exception):
    """A case can't be run here; the text says why."""


def ask(engine: ClientProcess, command: str, **arguments: Any) -> dict[str, Any]:
    """`ClientProcess.ask`; raises Skip for what the daemon refused."""
    return accepted(engine.ask(command, **arguments))


def accepted(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, unless it is a refusal: raises Skip."""
    if "refused" in answer:
        raise Skip(answer["refused"])
    return answer


@dataclass(frozen=True, slots=True)
class Gpu:
    """What its driver calls it, and the memory that nobody has allocated."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Engines:
    """One engine on the host, or one a GPU, each with a region of the same shape."""

    processes: tuple[ClientProcess, ...]

    def all(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have all begin at once, and wait for all. Raises Skip if one was refused."""
        for process in self.processes:
            process.tell(command, **arguments)
        return [accepted(answer) for answer in [process.answer() for process in self.processes]]


class Node:
    """A context manager: `offloadd serve` on these volumes, with an arena and movers for the GPUs. `devices`: where the engines' memory lies."""

    def __init__(self, volumes: Sequence[GridVolume], *, arena_bytes: int, gpu_count: int) -> None:
        self.volumes = volumes
        self.gpus = tuple(f"cuda:{number}" for number in range(gpu_count))
        self.devices = self.gpus or (HOST_DEVICE,)
        paths = [volume.path for volume in volumes]
        self._service = Service(volumes=paths, open_slabs=8, index_bytes_max=GIB, arena_bytes=arena_bytes, gpus=self.gpus)
        self._instances = itertools.count()
        self._ways: list[PathCapability] = []

    def __enter__(self) -> "Node":
        self._service.__enter__()
        try:
            self._service.ready_s()
            self._wait_for_volumes()
            with Client.connect(self._service.runtime_dir, instance="bench", process="bench", timeout_s=60) as client:
                self._ways = settled_paths(client, self.devices)
        except BaseException:
            self._service.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._service.stop()
        finally:
            self._service.__exit__()

    def client(self) -> ClientProcess:
        """An engine's process without a region."""
        return ClientProcess(self._service.runtime_dir, f"engine-{next(self._instances)}", module=ENGINE_MODULE)

    def _wait_for_volumes(self) -> None:
        """Until all are there: requests are spread over those that serve."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        with AdminClient(self._service.runtime_dir, timeout_s=SETTLE_TIMEOUT_S) as admin:
            while absent := [volume for volume in admin.volumes() if volume.state != "serving"]:
                if absent[0].state.startswith("failed") or time.monotonic() > end:
                    raise RuntimeError(f"{absent[0].path} does not serve: {absent[0].state}")
                time.sleep(0.05)

    def refusal(self, path: str) -> str:
        """Why a path is not there for one of the devices, in the daemon's words; empty if it is."""
        for device in self.devices:
            way = next((way for way in self._ways if (way.device, way.path.name.lower()) == (device, path)), None)
            if way is None:
                return f"{device}: the daemon knows no path {path}"
            if not way.available:
                return f"{device}: {way.note}" if self.gpus else way.note
        return ""

    def cpu_s(self) -> float:
        """CPU seconds of the front, the movers and the keepers so far."""
        pid = self._service.process.pid
        return cpu_seconds([pid, *children_of(pid)])

    def looked_up_gpus(self) -> list[Gpu]:
        """The GPUs as an engine sees them. Raises Skip when one can't be used."""
        found = []
        for gpu in self.gpus:
            with self.client() as looker:
                answer = ask(looker, "open_gpu", gpu=gpu)
            found.append(Gpu(str(answer["name"]), int(answer["free_bytes"])))
        return found

    @contextmanager
    def engines(self, kv: Kv, *, block_count: int, scattered: bool) -> Iterator[Engines]:
        """Engines with a region of this model's blocks each. At the end their blocks are dropped from the tiers. Raises Skip."""
        namespaces: list[bytes] = []
        with ExitStack() as stack:
            processes = []
            for device in self.devices:
                process = stack.enter_context(self.client())
                if self.gpus:
                    ask(process, "open_gpu", gpu=device)
                namespace = {
                    "model": kv.model.name,
                    # Blocks of an earlier run, or of another engine, are none of this one's.
                    "weights": secrets.token_hex(16),
                    "engine": "bench",
                    "kv_dtype": kv.kv_dtype,
                    "block_tokens": kv.shape.block_tokens,
                }
                shape = {"plane_count": kv.shape.plane_count, "piece_bytes": kv.shape.piece_bytes, "block_count": block_count}
                registered = ask(process, "register", **shape, scattered=scattered, namespace=namespace)
                namespaces.append(bytes.fromhex(registered["namespace_id"]))
                processes.append(process)
            yield Engines(tuple(processes))
        with AdminClient(self._service.runtime_dir, timeout_s=60) as admin:
            for namespace_id in namespaces:
                admin.drop_namespace(namespace_id)
