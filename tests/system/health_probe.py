"""Asks a daemon for its health every 20 ms over a connection of its own, until its standard input ends; then it tells how long each answer took, as JSON."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
PERIOD_S = 0.02
TIMEOUT_S = 60.0


def _probe(target: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    seconds, bad = [], []
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        print("ready", flush=True)
        while not ended.wait(PERIOD_S):
            start_s = time.monotonic()
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    bad.append(str(answer.status))
            except grpc.RpcError as error:
                bad.append(str(error.code()))  # type: ignore[attr-defined]
            seconds.append(time.monotonic() - start_s)
    print(json.dumps({"seconds": sorted(seconds), "bad": bad}), flush=True)


class HealthProbe:
    """The test's end of it. `seconds` (sorted) and `bad` are there once it was ended."""

    def __init__(self, socket: Path) -> None:
        self.seconds: list[float] = []
        self.bad: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.health_probe", f"unix:{socket}"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __enter__(self) -> "HealthProbe":
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._process.communicate(timeout=2 * TIMEOUT_S)
        told = json.loads(told)
        self.seconds, self.bad = told["seconds"], told["bad"]


if __name__ == "__main__":
    _probe(sys.argv[1])
