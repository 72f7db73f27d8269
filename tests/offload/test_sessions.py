import hmac
import os

import pytest

from offloadd.errors import InvalidRequest, LimitExceeded, UnknownSession
from offloadd.memory.memfd import create_sealed
from offloadd.offload import sessions
from offloadd.offload.sessions import DeviceChunks, Session, SessionTable


def make_table(sessions_max: int = 4, memories_max: int = 2) -> tuple[SessionTable, list[Session]]:
    ended: list[Session] = []
    return SessionTable(sessions_max=sessions_max, memories_per_session_max=memories_max, on_end=ended.append), ended


def create(table: SessionTable, instance: str = "engine", tenant: str = "uid:1000") -> Session:
    return table.create(tenant=tenant, instance=instance, uid=1000, pid=1, process="worker 0")


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_token_has_256_bits_and_leads_to_its_session() -> None:
    table, _ = make_table()
    first, second = create(table), create(table)
    assert len(bytes.fromhex(first.token)) == 32 and first.token != second.token
    assert table.by_token(first.token) is first and table.by_token(second.token) is second


@pytest.mark.parametrize("token", ["", "0" * 64, "ü", "\ud800", "x" * 100_000])
def test_a_wrong_token_is_an_unknown_session(token: str) -> None:
    table, _ = make_table()
    create(table)
    with pytest.raises(UnknownSession):
        table.by_token(token)


def test_a_token_is_found_by_digest_and_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = make_table()
    session = create(table)
    # No container is keyed by the token itself: its hash table would answer by the token's own bits.
    assert all(key != session.token and key != session.token.encode() for key in table._by_digest)
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return compare_digest(left, right)

    monkeypatch.setattr(sessions.hmac, "compare_digest", compare)
    table.by_token(session.token)
    assert compared == [(session.token.encode(), session.token.encode())]


def test_a_digest_that_meets_another_tokens_does_not_open_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_digest", lambda token: b"same")
    table, _ = make_table()
    create(table)
    with pytest.raises(UnknownSession):
        table.by_token("0" * 64)


def test_a_token_never_stands_in_a_repr() -> None:
    table, _ = make_table()
    session = create(table)
    assert session.token not in repr(session) and session.token not in repr(session.instance) and session.token not in repr(table)


def test_sessions_max_refuses_with_number_and_limit_and_an_end_makes_room() -> None:
    table, _ = make_table(sessions_max=2)
    first = create(table)
    create(table)
    with pytest.raises(LimitExceeded, match="2 sessions are live; sessions_max is 2"):
        create(table)
    table.end(first, "test")
    create(table)
    table.check()


def test_memories_beyond_the_limit_stay_the_callers() -> None:
    table, _ = make_table(memories_max=1)
    session = create(table)
    table.attach_memory(session, create_sealed("a", 4096), 4096)
    fd = create_sealed("b", 4096)
    with pytest.raises(LimitExceeded, match="has 1 memories; memories_per_session_max is 1"):
        table.attach_memory(session, fd, 4096)
    assert is_open(fd)
    os.close(fd)
    table.end(session, "test")


def test_memories_of_all_sessions_leave_half_of_the_files_to_the_daemon() -> None:
    table = SessionTable(sessions_max=2, memories_per_session_max=8, on_end=lambda session: None, memory_files_max=3)
    first, second = create(table), create(table)
    memory_id = table.attach_memory(first, create_sealed("a", 4096), 4096)
    table.attach_device_memory(second, (create_sealed("b", 4096), create_sealed("c", 4096)), 8192, DeviceChunks("GPU-0", (4096, 4096), 0))
    fd = create_sealed("d", 4096)
    with pytest.raises(LimitExceeded, match=r"all sessions have 3 descriptors of memories and session s-2 hands over 1; 3 is the most"):
        table.attach_memory(second, fd, 4096)
    assert is_open(fd)
    table.check()
    table.detach_memory(first, memory_id)
    table.attach_memory(second, fd, 4096)
    table.end(second, "test")
    table.check()
    for name in "abc":
        table.attach_memory(first, create_sealed(name, 4096), 4096)
    table.end(first, "test")
    table.check()


def test_the_end_of_a_session_runs_on_end_before_it_closes_descriptors_and_only_once() -> None:
    seen: list[bool] = []
    table = SessionTable(sessions_max=1, memories_per_session_max=1, on_end=lambda s: seen.extend(is_open(m.fds[0]) for m in s.memories.values()))
    session = create(table)
    fd = create_sealed("a", 4096)
    table.attach_memory(session, fd, 4096)
    reasons: list[str] = []
    session.at_end.append(reasons.append)
    assert table.end(session, "first") and not table.end(session, "second")
    assert seen == [True] and not is_open(fd) and reasons == ["first"]
    with pytest.raises(UnknownSession):
        table.by_token(session.token)
    with pytest.raises(UnknownSession):
        table.attach_memory(session, 0, 4096)
    table.check()


def test_descriptors_are_closed_even_if_on_end_fails() -> None:
    def fail(session: Session) -> None:
        raise RuntimeError("boom")

    table = SessionTable(sessions_max=1, memories_per_session_max=1, on_end=fail)
    session = create(table)
    fd = create_sealed("a", 4096)
    table.attach_memory(session, fd, 4096)
    with pytest.raises(RuntimeError):
        table.end(session, "test")
    assert not is_open(fd)


def test_a_detached_memory_stays_open_until_the_last_region_stops_using_it() -> None:
    table, _ = make_table()
    session = create(table)
    fd = create_sealed("a", 4096)
    memory_id = table.attach_memory(session, fd, 4096)
    table.use_memory(session, memory_id)
    table.use_memory(session, memory_id)
    table.detach_memory(session, memory_id)
    with pytest.raises(InvalidRequest, match=memory_id.hex()):
        table.use_memory(session, memory_id)
    table.disuse_memory(session, memory_id)
    assert is_open(fd)
    table.disuse_memory(session, memory_id)
    assert not is_open(fd) and not session.memories
    table.detach_memory(session, memory_id)


def test_an_instance_lives_from_its_first_session_to_its_last_and_its_ordinal_never_returns() -> None:
    table, _ = make_table()
    first, second = create(table), create(table)
    assert first.instance is second.instance
    ordinal = first.instance.ordinal
    table.end(first, "test")
    assert create(table).instance.ordinal == ordinal
    for session in table.sessions:
        table.end(session, "test")
    assert table.instances == []
    assert create(table).instance.ordinal > ordinal
    table.check()


def test_two_tenants_with_one_name_are_two_instances() -> None:
    table, _ = make_table()
    assert create(table, tenant="uid:1").instance is not create(table, tenant="uid:2").instance


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\x1b[31m", "\ud800"])
def test_names_that_logs_can_not_show_are_refused(name: str) -> None:
    table, _ = make_table()
    with pytest.raises(InvalidRequest, match="instance name"):
        create(table, instance=name)
    assert len(table) == 0


def test_a_session_has_one_stream_in_its_life() -> None:
    table, _ = make_table()
    session = create(table)
    assert table.open(session) and not table.open(session)
