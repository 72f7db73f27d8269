"""The mover process of one device: it moves bytes between engines' memory, the arena and volumes, and decides nothing.

Started by the front with one inherited control socket. The main thread handles control messages; each lane's threads read the lane's own socket. It opens no
file, imports no gRPC, and CUDA only for a GPU, and ends with its front.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

from offloadd.errors import InvalidRequest
from offloadd.ipc.channel import Channel
from offloadd.memory.memfd import validate_sealed
from offloadd.model.region import Layout, Plane
from offloadd.mover.arena import map_arena
from offloadd.mover.control_queue import ControlQueue
from offloadd.mover.device import AbsentDevice, HostDevice, MoverDevice
from offloadd.mover.lane import Lane
from offloadd.mover.messages import (
    AddLane,
    CloseMemory,
    Control,
    ControlAnswer,
    Descriptors,
    Fenced,
    FenceMove,
    ForgetMove,
    Hello,
    LaneReady,
    LaneRefused,
    LastOrders,
    MapArena,
    Mapped,
    MapRegion,
    MemoryClosed,
    NotMapped,
    Ping,
    Pong,
    Shutdown,
    Unmapped,
    UnmapRegion,
)
from offloadd.mover.placement import UNPLACED, Placement, place_threads
from offloadd.mover.tools import Memories
from offloadd.mover.volume import adopt_volume
from offloadd.tiers.scratch import Scratch
from offloadd.transfer.checksum import choose_fastest
from offloadd.transfer.native import NativeUnavailableError, load

_PR_SET_PDEATHSIG = 1


class Mover:
    """Handles control messages, one at a time, on the main thread."""

    def __init__(self, channel: Channel[Control], device: MoverDevice, note: str = "", placement: Placement = UNPLACED, *, lanes_apart: bool = False) -> None:
        """`lanes_apart`: the threads of each volume's lane have a descriptor table of their own. Not for a GPU, whose driver opens descriptors in one thread
        and uses them in others."""
        self._channel = channel
        self._lanes_apart = lanes_apart
        self._note = note
        self._placement = placement
        self._queue = ControlQueue(channel.sock)
        self._memories = Memories(device, self._queue.settle)
        self._lanes: list[Lane] = []
        #: Of the next `MapRegion`, ahead of its own.
        self._descriptors: list[int] = []

    def serve(self) -> bool:
        """Handle messages until the front says Shutdown (True) or is gone (False)."""
        device, placement = self._memories.device, self._placement
        self._answer(
            Hello(
                pid=os.getpid(),
                paths=device.paths,
                uuid=device.uuid,
                note=self._note,
                gpu=device.facts,
                memory_node=placement.memory_node,
                placement=placement.text,
                copies_by=device.copies_by,
            )
        )
        while True:
            self._queue.wait()
            received = self._channel.receive()
            if received is None:
                # The flag stays up: no copy begins any more.
                return False
            message, fds = received
            if isinstance(message, Shutdown):
                self._queue.end()
                self._finish()
                return True
            self._handle(message, fds)
            self._queue.handled()

    def _answer(self, message: ControlAnswer) -> None:
        self._channel.send(message)

    def _handle(self, message: Control, fds: list[int]) -> None:
        match message:
            case Descriptors():
                self._descriptors += fds
            case MapRegion():
                held, self._descriptors = self._descriptors, []
                self._answer(self._map_region(message, [*held, *fds]))
            case UnmapRegion():
                self._memories.engine.remove(message.region)
                self._answer(Unmapped(region=message.region))
            case MapArena():
                self._answer(self._map_arena(message, fds))
            case AddLane():
                self._add_lane(message, fds)
            case FenceMove():
                self._memories.engine.fence(message.move)
                self._answer(Fenced(move=message.move))
            case ForgetMove():
                self._memories.engine.forget(message.move)
            case Ping():
                self._answer(Pong())
            case LastOrders():
                last: Channel[CloseMemory] = Channel(socket.socket(fileno=fds[0]), CloseMemory)
                threading.Thread(target=self._wait_for_last_orders, args=(last,), name="last-orders", daemon=True).start()

    def _wait_for_last_orders(self, channel: Channel[CloseMemory]) -> None:
        if channel.receive() is not None:
            self._memories.engine.close()
            # Whoever asked may have gone meanwhile.
            with contextlib.suppress(OSError):
                channel.send(MemoryClosed())

    def _map_region(self, message: MapRegion, fds: Sequence[int]) -> Mapped | NotMapped:
        planes = tuple(Plane(spec.memory, spec.offset_bytes, spec.block_stride_bytes, spec.block_bytes) for spec in message.planes)
        region = None
        try:
            region = self._memories.device.map_region(Layout(message.block_count, planes), message.memory_bytes, fds, message.pieces)
            self._memories.engine.add(message.region, region)
        except (InvalidRequest, OSError, ValueError) as error:
            if region is not None:
                region.close()
            return NotMapped(region=message.region, error=str(error))
        finally:
            _close(fds)
        return Mapped(region=message.region)

    def _map_arena(self, message: MapArena, fds: Sequence[int]) -> Mapped | NotMapped:
        try:
            if self._memories.arena is not None or len(fds) != 1:
                raise InvalidRequest(f"an arena is one memory, mapped once; {len(fds)} descriptors came")
            validate_sealed(fds[0], message.arena_bytes)
            arena = map_arena(fds[0], message.arena_bytes, huge_pages=message.huge_pages, slab_bytes=message.slab_bytes, parts=message.parts)
            self._memories.device.adopt_arena(arena, self._placement.memory_node)
            self._memories.arena = arena
        except (InvalidRequest, OSError) as error:
            return NotMapped(region=0, error=str(error))
        finally:
            _close(fds)
        return Mapped(region=0)

    def _add_lane(self, message: AddLane, fds: Sequence[int]) -> None:
        expected = 3 if message.volume_uuid else 1
        if len(fds) != expected:
            raise ValueError(f"lane {message.lane} needs {expected} descriptors; {len(fds)} came")
        volume = None
        if message.volume_uuid:
            volume = adopt_volume(
                fds[1],
                fds[2],
                volume_uuid=message.volume_uuid,
                slab_bytes=message.slab_bytes,
                data_offset=message.data_offset,
                thread_count=message.thread_count,
                scratch=Scratch(message.scratch_offset, message.scratch_bytes),
            )
        lane = Lane(
            message.lane,
            socket.socket(fileno=fds[0]),
            self._memories,
            volume,
            path=message.path,
            thread_count=message.thread_count,
            staging_slot_bytes=message.staging_slot_bytes,
            # Before each copy they look whether a message waits there.
            shared_fds=[self._channel.sock.fileno()] if self._lanes_apart else None,
        )
        if message.path == "gds":
            # Drivers and file systems are asked for the first time here, and may hang: maps and fences go on meanwhile.
            threading.Thread(target=self._open_lane, args=(message.lane, lane), name="gds-open", daemon=True).start()
        else:
            self._open_lane(message.lane, lane)

    def _open_lane(self, number: int, lane: Lane) -> None:
        try:
            lane.open()
        except OSError as error:
            self._answer(LaneRefused(lane=number, why=str(error)))
            return
        self._lanes.append(lane)
        self._answer(LaneReady(lane=number))

    def _finish(self) -> None:
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _die_with_parent() -> None:
    """A front that is killed must not leave a process that has engine memory mapped and could still write to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _open_host(*, native: bool) -> HostDevice:
    if not native:
        return HostDevice(copies_by="NumPy, as configured")
    try:
        library = load()
    except NativeUnavailableError as error:
        print(f"mover: NumPy copies host memory, since the library that is faster can't be used: {error}", file=sys.stderr, flush=True)
        return HostDevice(copies_by=f"NumPy: the library that is faster can't be used: {error}")
    return HostDevice(library, copies_by=f"C with {library.ways}")


def _open_device(name: str, copies: Literal["auto", "engines", "kernels"], tell: Callable[[ControlAnswer], None], *, native: bool) -> tuple[MoverDevice, str]:
    """The device, and why it can't be used if it can't."""
    if name == "host":
        return _open_host(native=native), ""
    from offloadd.cuda.driver import CudaError
    from offloadd.mover.cuda_device import CudaDevice

    try:
        return CudaDevice(name, copies=copies, tell=tell), ""
    except CudaError as error:
        return AbsentDevice(str(error)), str(error)


def main() -> None:
    """Run the mover; exits 0 after Shutdown and when the front is gone."""
    parser = argparse.ArgumentParser(prog="offloadd-mover", description="Moves blocks for the offloadd front that started it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited control socket (SEQPACKET)")
    parser.add_argument("--device", default="host", metavar="host|cuda:N|GPU-UUID", help="the device that its regions lie in")
    parser.add_argument("--copies", choices=("auto", "engines", "kernels"), default="auto", help="what copies of a GPU go by; auto: as measured there")
    parser.add_argument("--no-native", dest="native", action="store_false", help="copy host memory by NumPy")
    parser.add_argument("--no-numa", dest="numa", action="store_false", help="do not bind threads to the CPUs near to the GPU")
    arguments = parser.parse_args()
    _die_with_parent()
    # Ctrl-C in a terminal reaches the whole process group; the front says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel: Channel[Control] = Channel(socket.socket(fileno=arguments.fd), Control)

    def tell(message: ControlAnswer) -> None:
        # When the front is gone, the main thread sees it and ends the process: nothing is left to be done in others.
        with contextlib.suppress(OSError):
            channel.send(message)

    try:
        choose_fastest()
        device, note = _open_device(arguments.device, arguments.copies, tell, native=arguments.native)
        # Before there is any thread or memory of ours. Those of the driver, which are there already, are bound, too.
        placement = place_threads(device.numa_node) if arguments.numa and device.uuid else UNPLACED
        clean = Mover(channel, device, note, placement, lanes_apart=arguments.device == "host").serve()
    except (BrokenPipeError, ConnectionResetError):
        clean = False
    except Exception:
        # A control message that can't be obeyed and has no answer of refusal (a lane without memory for its staging slots): the front starts another mover.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if not clean:
        # Nobody is left to answer. Leave at once, without tearing the interpreter down around threads that are in the middle of copies.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
