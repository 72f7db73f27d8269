"""A lane whose mover was replaced: what was sent to the old one is lost, and its late end does not cut off the new one."""

import asyncio

from offloadd.ipc.channel import socket_pair
from offloadd.model.enums import Path, Tier
from offloadd.offload.lanes import Lane
from tests.offload.queues import queue_of


async def test_the_end_of_an_old_mover_does_not_disconnect_its_successor() -> None:
    lane = Lane(number=1, name="/volume", tier=Tier.VOLUME, path=Path.BOUNCE, queue=queue_of())
    ours, old = socket_pair()
    lane.connect(ours)
    ours, new = socket_pair()
    lane.connect(ours)
    old.close()
    # One turn of the loop reads what there is, the end of the old socket, too.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert lane.connected
    new.close()
    lane.disconnect()
