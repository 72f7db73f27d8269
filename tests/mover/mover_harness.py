"""A real mover process, engine memory in memfds, and a real file opened with O_DIRECT."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from offloadd.ipc.channel import Channel, socket_pair
from offloadd.memory.memfd import create_sealed, map_shared
from offloadd.model.region import Layout, Plane
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import (
    AddLane,
    ControlAnswer,
    Copied,
    Hello,
    Job,
    LaneAnswer,
    LaneReady,
    MapArena,
    Mapped,
    MapRegion,
    PlaneSpec,
    SliceDone,
)
from offloadd.tiers.format import SLOT_DTYPE, slots_offset
from offloadd.units import MIB

ANSWER_TIMEOUT_S = 120
UUID = bytes(range(16))
NONCE = bytes(range(100, 116))


class Engine:
    """Engine memory with a layout; `read` and `write` move one block byte by byte as the formula says, sharing no code with the mover."""

    def __init__(self, layout, memory_bytes):
        self.layout = layout
        self.memory_bytes = tuple(memory_bytes)
        self.fds = [create_sealed("engine", size) for size in memory_bytes]
        self.maps = [map_shared(fd, size) for fd, size in zip(self.fds, memory_bytes, strict=True)]

    def read(self, block):
        parts = []
        for plane in self.layout.planes:
            begin = plane.offset_bytes + block * plane.block_stride_bytes
            parts.append(self.maps[plane.memory][begin : begin + plane.block_bytes])
        return b"".join(parts)

    def write(self, block, payload):
        at = 0
        for plane in self.layout.planes:
            begin = plane.offset_bytes + block * plane.block_stride_bytes
            self.maps[plane.memory][begin : begin + plane.block_bytes] = payload[at : at + plane.block_bytes]
            at += plane.block_bytes

    def fill(self, seed=1):
        for number, mapped in enumerate(self.maps):
            mapped[:] = np.random.default_rng((seed, number)).bytes(len(mapped))

    def snapshot(self):
        return [mapped[:] for mapped in self.maps]

    def close(self):
        for mapped in self.maps:
            mapped.close()
        for fd in self.fds:
            os.close(fd)


@dataclass
class VolumeFile:
    path: Path
    slab_bytes: int = 64 * MIB
    slab_count: int = 2
    data_offset: int = MIB
    fds: list = field(default_factory=list)

    def create(self):
        with self.path.open("wb") as file:
            file.truncate(self.data_offset + self.slab_count * self.slab_bytes)
        self.fds = [os.open(self.path, os.O_RDWR | os.O_DIRECT), os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_DSYNC)]
        return self

    def offset(self, slab, slot, slot_bytes):
        return self.data_offset + slab * self.slab_bytes + slots_offset(self.slab_bytes, slot_bytes) + slot * slot_bytes

    def read(self, slab, slot, slot_bytes):
        with self.path.open("rb") as file:
            file.seek(self.offset(slab, slot, slot_bytes))
            return file.read(slot_bytes)

    def write(self, slab, slot, slot_bytes, data, at=0):
        with self.path.open("r+b") as file:
            file.seek(self.offset(slab, slot, slot_bytes) + at)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def flip(self, slab, slot, slot_bytes, at):
        raw = self.read(slab, slot, slot_bytes)
        self.write(slab, slot, slot_bytes, bytes([raw[at] ^ 1]), at)

    def header(self, slab, slot, slot_bytes):
        return np.frombuffer(self.read(slab, slot, slot_bytes)[:4096], dtype=SLOT_DTYPE)[0]

    def close(self):
        for fd in self.fds:
            os.close(fd)


@dataclass
class Outcome:
    reasons: list
    checksums: list
    copied: int
    #: Names of the messages in the order in which they came.
    events: list
    done: list


class Lane:
    def __init__(self, sock):
        self.channel = Channel(sock, LaneAnswer)
        self.jobs = 0

    def submit(self, operation, records, slot_bytes, *, move=1, **options):
        self.jobs += 1
        self.channel.send(Job(job=self.jobs, move=move, operation=operation, slot_bytes=slot_bytes, blocks=records.tobytes(), **options))
        return self.jobs

    def collect(self, job, count):
        results = np.zeros(count, dtype=RESULT_DTYPE)
        outcome = Outcome([], [], 0, [], [])
        seen = 0
        while seen < count:
            received = self.channel.receive()
            assert received is not None, "the mover closed the lane"
            message = received[0]
            assert message.job == job
            outcome.events.append(type(message).__name__)
            if isinstance(message, Copied):
                outcome.copied += message.count
                continue
            assert isinstance(message, SliceDone)
            outcome.done.append(message)
            part = np.frombuffer(message.results, dtype=RESULT_DTYPE)
            results[part["position"]] = part
            seen += len(part)
        outcome.reasons, outcome.checksums = results["reason"].tolist(), results["checksum"].tolist()
        return outcome

    def run(self, operation, records, slot_bytes, **options):
        return self.collect(self.submit(operation, records, slot_bytes, **options), len(records))


class Mover:
    def __init__(self, *options):
        ours, theirs = socket_pair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        environment = dict(os.environ, GLIBC_TUNABLES="glibc.cpu.x86_non_temporal_threshold=0x40000")
        command = [sys.executable, "-m", "offloadd.mover.main", "--fd", str(theirs.fileno()), *options]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.control = Channel(ours, ControlAnswer)
        self.hello = self.receive()
        assert isinstance(self.hello, Hello)

    def receive(self):
        received = self.control.receive()
        assert received is not None, "the mover is gone"
        return received[0]

    def ask(self, message, fds=()):
        self.control.send(message, fds)
        return self.receive()

    def map_region(self, engine, number=1, *, layout=None, memory_bytes=None, fds=None):
        layout = layout or engine.layout
        planes = tuple(PlaneSpec(p.memory, p.offset_bytes, p.block_stride_bytes, p.block_bytes) for p in layout.planes)
        message = MapRegion(region=number, memory_bytes=memory_bytes or engine.memory_bytes, block_count=layout.block_count, planes=planes)
        return self.ask(message, engine.fds if fds is None else fds)

    def map_arena(self, fd, size):
        assert self.ask(MapArena(arena_bytes=size, huge_pages=True), [fd]) == Mapped(region=0)

    def lane_sockets(self):
        ours, theirs = socket_pair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        return Lane(ours), theirs

    def add_lane(self, volume=None, *, number=1, threads=4, staging=8 * MIB, sockets=None):
        lane, theirs = sockets or self.lane_sockets()
        if volume is None:
            answer = self.ask(AddLane(lane=number, path="ddr", thread_count=threads, staging_slot_bytes=0), [theirs.fileno()])
        else:
            message = AddLane(
                lane=number,
                path="host",
                thread_count=threads,
                staging_slot_bytes=staging,
                volume_uuid=UUID,
                slab_bytes=volume.slab_bytes,
                data_offset=volume.data_offset,
            )
            answer = self.ask(message, [theirs.fileno(), *volume.fds])
        assert answer == LaneReady(lane=number)
        theirs.close()
        return lane

    def close(self):
        self.control.close()
        assert self.process.wait(ANSWER_TIMEOUT_S) == 0


def make_records(blocks, payload_bytes, *, slots=None, region=1, arena_step=None, arena_first=0, **fields):
    """Records of blocks for neighbouring slots from 0 on; `fields` override."""
    count = len(blocks)
    records = np.zeros(count, dtype=BLOCK_DTYPE)
    keys = np.random.default_rng(7).integers(0, 256, (4096, 32), dtype=np.uint8)
    records["slot"] = np.arange(count) if slots is None else slots
    for index in range(count):
        records["key"][index] = np.void(keys[int(records["slot"][index])].tobytes())
    records["nonce"] = np.void(NONCE)
    records["payload_bytes"] = payload_bytes
    records["region"] = region
    records["block_index"] = blocks
    records["generation"] = 3
    records["namespace_ordinal"] = 5
    records["namespace_epoch"] = 6
    records["sequence"] = np.arange(count) + 1000
    records["position"] = np.arange(count)
    if arena_step is not None:
        records["arena_offset"] = arena_first + np.arange(count) * arena_step
    for name, value in fields.items():
        records[name] = value
    return records


def plain(block_count, block_bytes):
    """One plane of whole blocks."""
    return Layout(block_count, (Plane(0, 0, block_bytes, block_bytes),)), (block_count * block_bytes,)
