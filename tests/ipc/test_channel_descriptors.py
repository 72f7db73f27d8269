import fcntl
import os

import msgspec

from offloadd.ipc.channel import AsyncChannel, Channel, socket_pair


class Hand(msgspec.Struct, tag=True):
    """A message."""


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
    import asyncio

    ours, theirs = socket_pair()
    got: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    channel = AsyncChannel[Hand](theirs, Hand, on_message=lambda _, fds: got.set_result(fds), on_close=lambda: None)
    Channel[Hand](ours, Hand).send(Hand(), [0])
    fds = await asyncio.wait_for(got, 60)
    assert [is_close_on_exec(fd) for fd in fds] == [True]
    os.close(fds[0])
    channel.close()
    ours.close()
