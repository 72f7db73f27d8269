"""A keeper that does not answer costs whoever asks it a bounded time, and the front a bounded memory."""

import asyncio
from typing import Any

import pytest

from offloadd.errors import InvalidRequest, Unavailable
from offloadd.keeper.messages import Done, DropNamespace, Failed
from offloadd.offload.keeper_requests import WAITING_MAX, KeeperRequests


class Keeper:
    """Hears requests, and says nothing by itself."""

    alive = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


class Asked:
    def __init__(self) -> None:
        self.keeper = Keeper()
        self.late = 0
        self.requests = KeeperRequests(self.keeper, "/volume", self._on_late)  # type: ignore[arg-type]

    def _on_late(self) -> None:
        self.late += 1

    async def ask(self, wait_s: float | None = None) -> Any:
        return await self.requests.ask(DropNamespace(ticket=self.requests.ticket(), namespace_id=b"n" * 32), wait_s=wait_s)


async def test_each_answer_goes_to_the_request_with_its_ticket() -> None:
    asked = Asked()
    first, second = asyncio.create_task(asked.ask()), asyncio.create_task(asked.ask())
    await asyncio.sleep(0)
    one, two = asked.keeper.heard
    asked.requests.answered(Failed(ticket=two.ticket, kind="InvalidRequest", error="no"))
    asked.requests.answered(Done(ticket=one.ticket))
    assert await first == Done(ticket=one.ticket)
    with pytest.raises(InvalidRequest, match="/volume: no"):
        await second


async def test_a_request_that_is_not_answered_in_time_is_given_up_and_told_and_its_late_answer_is_nobodys() -> None:
    asked = Asked()
    with pytest.raises(Unavailable, match=r"did not answer a DropNamespace in 0\.01 s"):
        await asked.ask(wait_s=0.01)
    assert asked.late == 1
    later = asyncio.create_task(asked.ask())
    await asyncio.sleep(0)
    late, present = asked.keeper.heard
    asked.requests.answered(Done(ticket=late.ticket))
    await asyncio.sleep(0)
    assert not later.done()
    asked.requests.answered(Done(ticket=present.ticket))
    assert await later == Done(ticket=present.ticket)


async def test_requests_beyond_the_limit_are_refused_at_once_until_others_are_over() -> None:
    asked = Asked()
    waiting = [asyncio.create_task(asked.ask()) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=f"{WAITING_MAX} is the limit"):
        await asked.ask()
    assert len(asked.keeper.heard) == WAITING_MAX
    asked.requests.answered(Done(ticket=asked.keeper.heard[0].ticket))
    await waiting[0]
    again = asyncio.create_task(asked.ask())
    await asyncio.sleep(0)
    asked.requests.lost()
    for task in (*waiting[1:], again):
        with pytest.raises(Unavailable, match="died"):
            await task
