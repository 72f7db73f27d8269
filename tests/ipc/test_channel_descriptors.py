import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import Sequence

import msgspec
import pytest

from offloadd.ipc import channel as channel_module
from offloadd.ipc.channel import FDS_MAX, AsyncChannel, Channel, socket_pair


class Hand(msgspec.Struct, tag=True):
    """A message."""

    number: int = 0


def is_close_on_exec(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def test_received_descriptors_are_not_inherited_by_programs_started_later() -> None:
    ours, theirs = (Channel[Hand](sock, Hand) for sock in socket_pair())
    ours.send(Hand(), [0, 1])
    received = theirs.receive()
    assert received is not None and len(received[1]) == 2
    assert all(is_close_on_exec(fd) for fd in received[1])
    for fd in received[1]:
        os.close(fd)
    ours.close()
    theirs.close()


async def test_the_event_loops_end_receives_them_close_on_exec_too() -> None:
    ours, theirs = socket_pair()
    got: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    channel = AsyncChannel[Hand](theirs, Hand, on_message=lambda _, fds: got.set_result(fds), on_close=lambda: None)
    Channel[Hand](ours, Hand).send(Hand(), [0])
    fds = await asyncio.wait_for(got, 60)
    assert [is_close_on_exec(fd) for fd in fds] == [True]
    os.close(fds[0])
    channel.close()
    ours.close()


def test_one_packet_carries_as_many_descriptors_as_the_system_allows() -> None:
    ours, theirs = (Channel[Hand](sock, Hand) for sock in socket_pair())
    ours.send(Hand(), [0] * FDS_MAX)
    received = theirs.receive()
    assert received is not None and len(received[1]) == FDS_MAX
    for fd in received[1]:
        os.close(fd)
    # Not a limit of ours.
    with pytest.raises(OSError, match="Invalid argument"):
        ours.send(Hand(), [0] * (FDS_MAX + 1))
    ours.close()
    theirs.close()


async def test_too_many_descriptors_in_flight_delay_messages_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket_pair()
    refusals = [errno.ETOOMANYREFS, errno.ETOOMANYREFS]
    send_fds = socket.send_fds

    def limited(sock: socket.socket, buffers: Sequence[bytes], fds: Sequence[int]) -> int:
        if refusals:
            raise OSError(refusals.pop(), "Too many references: cannot splice")
        return send_fds(sock, buffers, fds)

    monkeypatch.setattr(channel_module.socket, "send_fds", limited)
    closed: list[bool] = []
    channel = AsyncChannel[Hand](ours, Hand, on_message=lambda _, fds: None, on_close=lambda: closed.append(True))
    channel.send(Hand(1), [0])
    channel.send(Hand(2))
    assert channel.backlog == 2
    receiver = Channel[Hand](theirs, Hand)
    received = [await asyncio.wait_for(asyncio.to_thread(receiver.receive), 60) for _ in range(2)]
    assert [(message.number, len(fds)) for message, fds in filter(None, received)] == [(1, 1), (2, 0)]
    assert not closed and not refusals
    for fd in received[0][1] if received[0] else []:
        os.close(fd)
    channel.close()
    receiver.close()


async def test_a_channel_that_was_closed_while_it_waited_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket_pair()
    tries: list[int] = []

    def limited(sock: socket.socket, buffers: Sequence[bytes], fds: Sequence[int]) -> int:
        tries.append(1)
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    monkeypatch.setattr(channel_module.socket, "send_fds", limited)
    monkeypatch.setattr(channel_module, "IN_FLIGHT_PAUSE_S", 0.0)
    channel = AsyncChannel[Hand](ours, Hand, on_message=lambda _, fds: None, on_close=lambda: None)
    channel.send(Hand(), [0])
    channel.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert tries == [1]
    theirs.close()


async def test_descriptors_that_were_closed_while_a_message_waited_do_not_cost_the_channel() -> None:
    ours, theirs = socket_pair()
    channel = AsyncChannel[Hand](ours, Hand, on_message=lambda _, fds: None, on_close=lambda: None)
    count = 0
    while not channel.backlog:
        channel.send(Hand(count))
        count += 1
    gone = os.open("/dev/null", os.O_RDONLY)
    channel.send(Hand(count), [gone])
    channel.send(Hand(count + 1), [0])
    os.close(gone)
    receiver = Channel[Hand](theirs, Hand)
    for number in range(count + 2):
        received = await asyncio.wait_for(asyncio.to_thread(receiver.receive), 60)
        assert received is not None and received[0].number == number
        assert len(received[1]) == (1 if number == count + 1 else 0)
        for fd in received[1]:
            os.close(fd)
    assert not channel.closed
    channel.close()
    receiver.close()
