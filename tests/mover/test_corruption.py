"""Whatever a volume gives instead of what was written to it, no wrong byte reaches an engine: every bit of a header, and payload faults by the thousand."""

from collections.abc import Callable

import numpy as np
import pytest

from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover import slot_io
from offloadd.mover.messages import Operation
from offloadd.tiers.format import SLOT_DTYPE, seal, slot_bytes_for
from offloadd.units import MIB, SECTOR_BYTES

from ..torture import Rounds
from .mover_harness import UUID, make_records
from .test_mover_fences import Workshop, _library

PAYLOAD_BYTES = 20_000
SLOT_BYTES = slot_bytes_for(PAYLOAD_BYTES)
COUNT = 4
#: Bits at a time: 16 MiB of headers.
AT_ONCE = 4096

Slots = np.ndarray


def _each_bit(header: bytes) -> "list[np.ndarray]":
    """Copies of the header, each with one bit flipped, some thousand at a time."""
    parts = []
    for first in range(0, 8 * len(header), AT_ONCE):
        copies = np.tile(np.frombuffer(header, np.uint8), (AT_ONCE, 1))
        bits = np.arange(first, first + AT_ONCE)
        copies[np.arange(AT_ONCE), bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)
        parts.append(copies)
    return parts


@pytest.fixture(params=["numpy", "as_built"])
def workshop(volume, request):
    workshop = Workshop(volume, PAYLOAD_BYTES, native=_library() if request.param == "as_built" else None)
    assert workshop.run(Operation.EVICT, make_records(range(COUNT), PAYLOAD_BYTES)) == [0] * COUNT
    yield workshop
    workshop.close()


@pytest.mark.torture("P1")
def test_no_bit_of_a_slot_header_flips_unnoticed(workshop, volume, record_property):
    record = make_records(range(COUNT), PAYLOAD_BYTES)[2:3]
    header = volume.read(0, 2, SLOT_BYTES)[:SECTOR_BYTES]
    judged = 0
    for copies in _each_bit(header):
        good = slot_headers.judge(copies.reshape(-1).view(SLOT_DTYPE), np.tile(record, AT_ONCE), volume_uuid=UUID)
        assert not good.any(), f"bit {judged + int(good.argmax())} flipped, and the header counts"
        judged += AT_ONCE
    assert slot_headers.judge(np.frombuffer(header, SLOT_DTYPE), record, volume_uuid=UUID).all() and judged == 8 * SECTOR_BYTES
    record_property("bits", judged)


@pytest.mark.torture("P1")
def test_no_bit_of_a_long_slots_header_flips_unnoticed(volume, record_property):
    workshop = Workshop(volume, 9 * MIB, 2)
    record = make_records([0], 9 * MIB)
    assert workshop.run(Operation.EVICT, record) == [0]
    header = volume.read(0, 0, workshop.slot_bytes)[:SECTOR_BYTES]
    judged = 0
    for copies in _each_bit(header):
        for copy in copies:
            assert not slot_headers.judge_chunked(copy.view(SLOT_DTYPE), record, volume_uuid=UUID, chunk_count=3), f"bit {judged} flipped"
            judged += 1
    assert slot_headers.judge_chunked(np.frombuffer(header, SLOT_DTYPE), record, volume_uuid=UUID, chunk_count=3)
    record_property("bits", judged)
    workshop.close()


# -- what a device may give instead of a slot: each takes the slots of one read, shape (COUNT, SLOT_BYTES), and changes the one at `index` ----------------


def _flip(slots: Slots, index: int, random: np.random.Generator) -> None:
    at = SECTOR_BYTES + int(random.integers(PAYLOAD_BYTES))
    slots[index, at] ^= 1 << int(random.integers(8))


def _two_signs(slots: Slots, index: int, random: np.random.Generator) -> None:
    """The highest bits of two values of 16 bits: sums and many weak checksums do not see it."""
    first, second = random.choice(PAYLOAD_BYTES // 2, 2, replace=False)
    slots[index, SECTOR_BYTES + 2 * first + 1] ^= 0x80
    slots[index, SECTOR_BYTES + 2 * second + 1] ^= 0x80


def _many_bits(slots: Slots, index: int, random: np.random.Generator) -> None:
    at = random.choice(PAYLOAD_BYTES, int(random.integers(2, 200)), replace=False)
    slots[index, SECTOR_BYTES + at] ^= random.integers(1, 256, at.size, dtype=np.uint8)


def _swapped_pages(slots: Slots, index: int, random: np.random.Generator) -> None:
    first, second = (SECTOR_BYTES * (1 + int(page)) for page in random.choice(PAYLOAD_BYTES // SECTOR_BYTES, 2, replace=False))
    slots[index, first : first + SECTOR_BYTES], slots[index, second : second + SECTOR_BYTES] = (
        slots[index, second : second + SECTOR_BYTES].copy(),
        slots[index, first : first + SECTOR_BYTES].copy(),
    )


def _zero_page(slots: Slots, index: int, random: np.random.Generator) -> None:
    at = SECTOR_BYTES * (1 + int(random.integers(PAYLOAD_BYTES // SECTOR_BYTES)))
    slots[index, at : at + SECTOR_BYTES] = 0


def _zero_payload(slots: Slots, index: int, random: np.random.Generator) -> None:
    slots[index, SECTOR_BYTES:] = 0


def _zero_slot(slots: Slots, index: int, random: np.random.Generator) -> None:
    slots[index] = 0


def _torn(slots: Slots, index: int, random: np.random.Generator) -> None:
    """The write stopped after some sectors: behind them is what was there before."""
    slots[index, SECTOR_BYTES * int(random.integers(1, 5)) :] = random.integers(0, 256, dtype=np.uint8)


def _shifted(slots: Slots, index: int, random: np.random.Generator) -> None:
    slots[index, SECTOR_BYTES:] = np.roll(slots[index, SECTOR_BYTES:], int(random.integers(1, SLOT_BYTES - SECTOR_BYTES)))


def _payload_of_another(slots: Slots, index: int, random: np.random.Generator) -> None:
    slots[index, SECTOR_BYTES:] = slots[(index + int(random.integers(1, COUNT))) % COUNT, SECTOR_BYTES:]


def _slot_of_another(slots: Slots, index: int, random: np.random.Generator) -> None:
    """A read or a write went to a neighbour's place: everything about it is sound, and it is not what was asked for."""
    slots[index] = slots[(index + int(random.integers(1, COUNT))) % COUNT]


def _sound_but(**changes: Callable[[np.ndarray], object]) -> Callable[[Slots, int, np.random.Generator], None]:
    """A header that is sealed and right but for one field."""

    def change(slots: Slots, index: int, random: np.random.Generator) -> None:
        header = slots[index : index + 1, :SECTOR_BYTES].copy().reshape(-1).view(SLOT_DTYPE)
        for name, of in changes.items():
            header[name] = of(header[name])
        seal(header)
        slots[index, :SECTOR_BYTES] = header.view(np.uint8)

    return change


FAULTS = {
    "one bit": _flip,
    "two signs": _two_signs,
    "many bits": _many_bits,
    "swapped pages": _swapped_pages,
    "zero page": _zero_page,
    "zero payload": _zero_payload,
    "zero slot": _zero_slot,
    "torn write": _torn,
    "shifted": _shifted,
    "another's payload": _payload_of_another,
    "another's slot": _slot_of_another,
    "older generation": _sound_but(generation=lambda value: value - 1),
    "another cut": _sound_but(nonce=lambda value: np.void(b"another nonce...")),
    "another volume": _sound_but(volume_uuid=lambda value: np.void(b"another volume..")),
    "another key": _sound_but(key=lambda value: np.void(bytes(32))),
    "another namespace": _sound_but(namespace_ordinal=lambda value: value + 1),
    "an earlier life of the namespace": _sound_but(namespace_epoch=lambda value: value - 1),
    "another slab": _sound_but(slab=lambda value: value + 1),
    "another length": _sound_but(payload_bytes=lambda value: value - 1),
    "a codec": _sound_but(codec=lambda value: value + 1),
    "a cipher": _sound_but(cipher=lambda value: value + 1),
    "another kind of checksum": _sound_but(checksum_kind=lambda value: value + 1),
    "another checksum": _sound_but(checksum=lambda value: value ^ 1),
}


@pytest.mark.torture("P1")
def test_no_fault_of_a_payload_is_handed_over(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, rounds: Rounds) -> None:
    real = slot_io.read
    random = np.random.default_rng(20)
    records = make_records(range(COUNT), PAYLOAD_BYTES)
    original = [workshop.engine.read(block) for block in range(COUNT)]
    engine = workshop.engine.maps[0]
    wiped = bytes([0xA5]) * (COUNT * PAYLOAD_BYTES)
    fault, index, changed = FAULTS["one bit"], 0, False

    def read(fd: int, buffers: list[np.ndarray], offset: int) -> int:
        nonlocal changed
        count = real(fd, buffers, offset)
        slots = buffers[0].reshape(COUNT, SLOT_BYTES)
        before = slots[index].tobytes()
        fault(slots, index, random)
        # What lies behind the payload is nobody's.
        end = SECTOR_BYTES + PAYLOAD_BYTES
        changed = before[:end] != slots[index, :end].tobytes()
        return count

    monkeypatch.setattr(slot_io, "read", read)
    names = list(FAULTS)
    done = number = 0
    wanted = rounds(5_000, 500_000, "faults")
    while done < wanted:
        name = names[number % len(names)]
        fault, index = FAULTS[name], int(random.integers(COUNT))
        number += 1
        engine[: len(wiped)] = wiped
        reasons = workshop.run(Operation.RESTORE, records)
        if not changed:
            # By chance the same bytes as before.
            assert reasons == [0] * COUNT
            continue
        done += 1
        assert reasons[index] in (Reason.HEADER_MISMATCH, Reason.CHECKSUM_MISMATCH), f"{name}, number {number}: the block was handed over"
        found = [workshop.engine.read(block) for block in range(COUNT)]
        assert found[index] == wiped[:PAYLOAD_BYTES], f"{name}, number {number}: bytes of the bad block reached the engine"
        assert [reason for at, reason in enumerate(reasons) if at != index] == [0] * (COUNT - 1), f"{name}, number {number}: a neighbour was refused"
        assert all(found[at] == original[at] for at in range(COUNT) if at != index)


def test_without_verification_the_same_faults_are_handed_over(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on: the faults reach the bytes that a restore hands over."""
    real = slot_io.read

    def read(fd: int, buffers: list[np.ndarray], offset: int) -> int:
        count = real(fd, buffers, offset)
        _flip(buffers[0].reshape(COUNT, SLOT_BYTES), 1, np.random.default_rng(1))
        return count

    monkeypatch.setattr(slot_io, "read", read)
    original = workshop.engine.read(1)
    workshop.engine.maps[0][: COUNT * PAYLOAD_BYTES] = bytes(COUNT * PAYLOAD_BYTES)
    assert workshop.run(Operation.RESTORE, make_records(range(COUNT), PAYLOAD_BYTES), verify=False) == [0] * COUNT
    assert workshop.engine.read(1) != original and workshop.engine.read(0) != bytes(PAYLOAD_BYTES)
