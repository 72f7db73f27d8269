"""What requests may let copies wait for: each shape that can't be is refused, and the others arrive as they were sent."""

from collections.abc import Callable
from typing import Any

import pytest

from offloadd.client import Blocks, Namespace, Region
from offloadd.client import convert as client
from offloadd.errors import InvalidRequest
from offloadd.model.device_event import EventName, FlagValue
from offloadd.rpc import convert
from offloadd.rpc.convert import RequestLimits
from offloadd.v1 import offload_pb2 as pb

LIMITS = RequestLimits(blocks_per_request_max=8, deadline_s=1.0, deadline_s_max=10.0, keep_ttl_s=1.0, keep_ttl_s_max=1.0, lease_s_max=1.0)
HANDLE = bytes(range(64))
REGION = Region("cuda:0", 0, 8, (), (), Namespace(), region_id=b"r")


def source_ready(event: pb.DeviceEvent | None) -> EventName:
    return convert.evict_options(pb.EvictRequest(source_ready=event), None, LIMITS).source_ready


def destination_free(event: pb.DeviceEvent | None) -> EventName:
    return convert.restore_options(pb.RestoreRequest(destination_free=event), None, LIMITS).destination_free


READS = {"source_ready": source_ready, "destination_free": destination_free}


@pytest.fixture(params=READS)
def field(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def read(field: str) -> Callable[[pb.DeviceEvent | None], EventName]:
    return READS[field]


@pytest.mark.parametrize("event", [b"", HANDLE, FlagValue(HANDLE, 0, 1), FlagValue(HANDLE, (1 << 64) - 8, (1 << 64) - 1)])
def test_what_the_client_names_is_what_arrives(read: Callable[[Any], EventName], event: EventName) -> None:
    assert read(client.device_event(event)) == event


@pytest.mark.parametrize("event", [HANDLE, FlagValue(HANDLE, 8, 3)])
def test_both_requests_carry_it(event: EventName) -> None:
    blocks = Blocks(REGION, [0], [b"a"])
    evict, restore = client.evict_request(blocks, source_ready=event), client.restore_request(blocks, destination_free=event)
    assert evict.source_ready == restore.destination_free == client.device_event(event)
    assert not client.evict_request(blocks).HasField("source_ready") and not client.restore_request(blocks).HasField("destination_free")


def flag(*, handle: bytes = HANDLE, offset_bytes: int = 8, memory_bytes: int = 8, value: int = 1) -> pb.DeviceEvent:
    return pb.DeviceEvent(flag=pb.DeviceFlag(word=pb.CudaIpcHandle(handle=handle, offset_bytes=offset_bytes, memory_bytes=memory_bytes), value=value))


REFUSED = {
    "nothing": (pb.DeviceEvent(), "names neither an event nor a flag; exactly one is needed"),
    "an event's handle too short": (pb.DeviceEvent(handle=b""), "has a handle of 0 bytes; a CUDA IPC event handle has 64"),
    "an event's handle too long": (pb.DeviceEvent(handle=HANDLE + b"x"), "has a handle of 65 bytes; a CUDA IPC event handle has 64"),
    "a flag of nothing": (pb.DeviceEvent(flag=pb.DeviceFlag()), "has a flag with a handle of 0 bytes; a CUDA IPC memory handle has 64"),
    "a flag's handle too long": (flag(handle=HANDLE + b"x"), "has a flag with a handle of 65 bytes; a CUDA IPC memory handle has 64"),
    "half a word": (flag(memory_bytes=4), "has a flag of 4 bytes; its word has 8"),
    "two words": (flag(memory_bytes=16), "has a flag of 16 bytes; its word has 8"),
    "no word": (flag(memory_bytes=0), "has a flag of 0 bytes; its word has 8"),
    "a word that is not aligned": (flag(offset_bytes=12), "has a flag at offset 12; it must be a multiple of 8"),
    "a value that every word has": (flag(value=0), "has a flag with value 0, which every word has reached; at least 1 is needed"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_waited_for_is_refused(read: Callable[[Any], EventName], field: str, kind: str) -> None:
    event, why = REFUSED[kind]
    with pytest.raises(InvalidRequest) as raised:
        read(event)
    assert str(raised.value) == f"{field} {why}"


def test_an_event_and_a_flag_exclude_each_other_on_the_wire() -> None:
    both = pb.DeviceEvent.FromString(pb.DeviceEvent(handle=HANDLE).SerializeToString() + flag().SerializeToString())
    assert both.WhichOneof("source") == "flag", "the last one counts, as in every oneof"
    assert source_ready(both) == FlagValue(HANDLE, 8, 1)
