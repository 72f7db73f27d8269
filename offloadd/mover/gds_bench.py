"""What a thread of a `gds` lane works with: a staging slot on the GPU that cuFile knows, and room on the host for header sectors."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from offloadd.cuda.closing import close_all
from offloadd.cuda.gds import GdsVolume, ShortTransfer, StagingSlot
from offloadd.cuda.gds_setup import Gds, GdsUnavailable, WhyNot
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.plain import clear, copy
from offloadd.cuda.probe import probe
from offloadd.cuda.region import CudaRegion, Places
from offloadd.memory.mapping import Bytes, Mapping, map_private
from offloadd.memory.planes import PlaneGroup
from offloadd.model.enums import Way
from offloadd.mover.cuda_device import CudaDevice
from offloadd.mover.device import make_all
from offloadd.mover.slot_io import ShortIoError
from offloadd.mover.volume import Volume
from offloadd.tiers.scratch import PROBE_BYTES
from offloadd.transfer.kernels.base import DeviceKernels, Slots
from offloadd.units import SECTOR_BYTES

Checksums = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.intp]

_LENGTH_BYTES, _CRC_BYTES = 8, 4
#: A volume that hangs costs the opening thread; its other lanes are open by then.
PROBE_TIMEOUT_S = 10.0


class GdsBench:
    """One thread's. The staging slot holds slots as they lie on the volume: a header sector and a payload each, `slot_bytes` apart."""

    def __init__(self, device: CudaDevice, gds: Gds, volume: GdsVolume, kernels: DeviceKernels, size_bytes: int) -> None:
        """Allocates `size_bytes` on the GPU, and little more. Raises OSError; nothing is held then."""
        self._device = device
        self._proof = gds.proof
        #: How the last I/O went, or one of another thread at the same time: it can't be told which, so all of them are told the worst.
        self.way = Way.UNPROVEN
        self._volume = volume
        self._kernels = kernels
        self._count_max = size_bytes // (2 * SECTOR_BYTES)
        held: list[StagingSlot | DeviceMemory | HostRegistration | Mapping] = []
        try:
            self._slot = StagingSlot.allocate(device.device, size_bytes)
            held.append(self._slot)
            #: Lengths, then checksums, of the slots.
            self._numbers = DeviceMemory.allocate(device.device, self._count_max * (_LENGTH_BYTES + _CRC_BYTES))
            held.append(self._numbers)
            pages = map_private(self._count_max * (SECTOR_BYTES + _LENGTH_BYTES + _CRC_BYTES))
            held.append(pages)
            held.append(HostRegistration.register(device.device, pages.bytes.ctypes.data, pages.bytes.nbytes))
        except BaseException:
            close_all(held[::-1])
            raise
        self._held = held
        ends = np.cumsum([self._count_max * size for size in (SECTOR_BYTES, _LENGTH_BYTES, _CRC_BYTES)]).tolist()
        #: Header sectors, one after the other.
        self.bytes: Bytes = pages.bytes[: ends[0]]
        self._lengths = pages.bytes[ends[0] : ends[1]].view(np.uint64)
        self._crcs = pages.bytes[ends[1] : ends[2]].view(np.uint32)

    def close(self) -> None:
        """See `Bench`. In the reverse order: cuFile and the driver forget memory before it is freed."""
        close_all(self._held[::-1])

    def pages(self, count: int) -> Bytes:
        """Room for the header sectors of `count` slots, one after the other in host memory."""
        return self.bytes[: count * SECTOR_BYTES]

    def payloads(self, chosen: Indices, slot_bytes: int) -> Places:
        """Where the payloads of the chosen slots lie on the GPU."""
        return Places(self._slot.address, self._slot.size_bytes, chosen * slot_bytes + SECTOR_BYTES, slot_bytes, on_device=True)

    def clear(self, size_bytes: int) -> None:
        """Zero the staging slot's beginning."""
        with self._device.copying() as stream:
            clear(self._slot.address, size_bytes, stream)

    def put_pages(self, count: int, slot_bytes: int) -> None:
        """Put the header sectors into the staged slots."""
        with self._device.copying() as stream:
            self._device.engines.scatter(self._sectors(count, slot_bytes), np.arange(count), self._page_places(count), stream)

    def fetch_pages(self, count: int, slot_bytes: int) -> Bytes:
        """The header sectors of the staged slots, one after the other."""
        with self._device.copying() as stream:
            self._device.engines.gather(self._sectors(count, slot_bytes), np.arange(count), self._page_places(count), stream)
        return self.pages(count)

    def _sectors(self, count: int, slot_bytes: int) -> CudaRegion:
        """The staged slots' header sectors, as a region of `count` blocks."""
        return CudaRegion((PlaneGroup(self._slot.address, 1, 0, slot_bytes, SECTOR_BYTES),), count, SECTOR_BYTES)

    def _page_places(self, count: int) -> Places:
        return Places(self.bytes.ctypes.data, self.bytes.nbytes, np.arange(count) * SECTOR_BYTES, SECTOR_BYTES, on_device=False)

    def checksums(self, payload_bytes: npt.NDArray[np.uint32], slot_bytes: int) -> Checksums:
        """CRC32C of the payloads of the first slots, one a length, computed on the GPU."""
        count = len(payload_bytes)
        self._lengths[:count] = payload_bytes
        lengths = self._numbers.address
        crcs = lengths + self._count_max * _LENGTH_BYTES
        with self._device.copying() as stream:
            copy(lengths, self._lengths.ctypes.data, count * _LENGTH_BYTES, stream)
            slots = Slots(self._slot.address, slot_bytes, SECTOR_BYTES)
            self._kernels.checksums(slots, count, lengths, int(payload_bytes.max()), crcs, stream=int(stream.handle))
            copy(self._crcs.ctypes.data, crcs, count * _CRC_BYTES, stream)
        return self._crcs[:count].copy()

    def read(self, size_bytes: int, offset: int) -> int:
        """Fill the staging slot's beginning from the volume; the count of bytes. Raises OSError, ShortIoError."""
        with self._one_io():
            return self._volume.read(self._slot, 0, size_bytes, offset)

    def write(self, size_bytes: int, offset: int, *, durable: bool) -> int:
        """Write the staging slot's beginning to the volume, on the device when it returns if `durable`; the count of bytes. Raises OSError, ShortIoError."""
        with self._one_io():
            count = self._volume.write(self._slot, 0, size_bytes, offset)
        if durable:
            self._volume.sync()
        return count

    @contextmanager
    def _one_io(self) -> Iterator[None]:
        before = self._proof.snapshot()
        try:
            yield
        except ShortTransfer as error:
            raise ShortIoError(str(error)) from error
        self.way = self._proof.since(before).way


def open_gds_benches(device: CudaDevice, volume: Volume, count: int, size_bytes: int) -> list[GdsBench]:
    """For the threads of a lane to this volume. Raises OSError that says why there is no way past the host; nothing is held then."""
    gds, kernels = device.gds(size_bytes)
    # Without a scratch area no byte of the volume is nobody's: only read.
    writes = volume.scratch.has_probe
    offset = volume.scratch.offset if writes else 0
    # One volume after the other: counts are of the whole process, and one that bounces would make another look as if it did, and be refused.
    with device.probing:
        found = probe(gds, volume.data_fd, volume.synced_fd, slot_bytes=PROBE_BYTES, file_offset=offset, writes=writes, timeout_s=PROBE_TIMEOUT_S)
    if not found.available:
        raise GdsUnavailable(found.reason or WhyNot.UNPROVEN, found.why)
    opened = GdsVolume.open(gds, volume.data_fd, volume.synced_fd)
    try:
        return make_all(count, lambda: GdsBench(device, gds, opened, kernels, size_bytes))
    except BaseException:
        opened.close()
        raise
