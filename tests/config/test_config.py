"""What the configuration accepts, and what it says about the rest."""

from pathlib import Path

import pytest

from offloadd.config import ArenaConfig, Config, DaemonConfig, LimitsConfig, MoverConfig, VolumeConfig, load_config, parse_size
from offloadd.config.sizes import default_arena_bytes
from offloadd.errors import ConfigError
from offloadd.units import GIB, MIB


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "offloadd.toml"
    path.write_text(text)
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'offloadd.toml'}")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "size"),
    [("8 GiB", 8 * GIB), ("8GiB", 8 * GIB), (" 1.5 MiB ", 3 * MIB // 2), ("17", 17), ("17 B", 17), (17, 17), ("0", 0), ("2 TiB", 2048 * GIB), ("1 KiB", 1024)],
)
def test_a_size_may_be_written_with_or_without_a_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 GB", "8 G", "-1", "1e3", "0.3 KiB", "1 2", "٣ KiB", "99999999 TiB", True, 1.0, None])
def test_a_size_that_could_be_misread_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"needed|unit|whole|at most"):
        parse_size(text)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == load_config(None) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nsesions_max = 1", "limits.sesions_max is unknown; did you mean limits.sessions_max?"),
        ("[limit]\nsessions_max = 1", "limit is unknown; did you mean limits?"),
        ("[[volume]]\npath = '/a'\nio_thread = 1", "volume[0].io_thread is unknown; did you mean volume[0].io_threads?"),
        ("[arena]\nzzz = 1", "arena.zzz is unknown; known: slab_bytes, arena_bytes, huge_pages"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).endswith(f": {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nsessions_max = 0", "limits.sessions_max is 0; at least 1 is needed"),
        ("[limits]\nsessions_max = 65537", "limits.sessions_max is 65537; at most 65536 is possible"),
        ("[limits]\nsessions_max = '7'", 'limits.sessions_max is "7"; a whole number is needed'),
        ("[limits]\nsessions_max = true", "limits.sessions_max is true; a whole number is needed"),
        ("[limits]\nsessions_max = 1.5", "limits.sessions_max is 1.5; a whole number is needed"),
        ("[limits]\ndeadline_s = nan", "limits.deadline_s is NaN; a finite number is needed"),
        ("[limits]\ndeadline_s = 'x'", 'limits.deadline_s is "x"; a finite number is needed'),
        ("[limits]\ndeadline_s = 0", "limits.deadline_s is 0; at least 0.001 is needed"),
        ("[limits]\ndeadline_s = 10.0\ndeadline_s_max = 5", "limits: deadline_s is 10.0; deadline_s_max is 5.0"),
        ("[limits]\nrequests_max = 3", "limits: requests_per_session_max is 64; requests_max is 3"),
        ("[limits]\nindex_bytes_max = '4 GB'", 'limits.index_bytes_max is "4 GB"; its unit "GB" is not one of B, KiB, MiB, GiB, TiB'),
        ("[limits]\nmessage_bytes_max = '1 KiB'", "limits.message_bytes_max is 1024; at least 65536 is needed"),
        ("[arena]\nslab_bytes = '3 MiB'", 'arena.slab_bytes is "3 MiB"; a multiple of 2 MiB, the huge page size, is needed'),
        ("[arena]\narena_bytes = '65 MiB'", "arena: arena_bytes is 68157440; a multiple of slab_bytes 67108864 is needed"),
        ("[arena]\nhuge_pages = 'yes'", "arena.huge_pages is \"yes\"; 'auto', 'never' or 'require' is needed"),
        ("[mover]\nstaging_slot_bytes = '17 MiB'", "mover.staging_slot_bytes is 17825792; at most 16777216 is possible"),
        ("[mover]\nstaging_slot_bytes = 8388609", "mover.staging_slot_bytes is 8388609; a multiple of 4096 is needed"),
        (
            "[mover]\nstaging_slot_bytes = '16 MiB'\nrestore_bytes_in_flight = '8 MiB'",
            "mover: restore_bytes_in_flight is 8388608; at least staging_slot_bytes 16777216 is needed",
        ),
        ("[[volume]]\nio_threads = 1", "volume[0].path is missing"),
        ("[[volume]]\npath = 'disk.img'", 'volume[0].path is "disk.img"; an absolute path is needed'),
        ("[[volume]]\npath = '/a'\nprewrite = 1", "volume[0].prewrite is 1; true or false is needed"),
        ("[volume]\npath = '/a'", 'volume is {"path": "/a"}; an array of tables is needed: [[volume]]'),
        ("limits = 3", "limits is 3; a table is needed"),
        ("[daemon]\nlog_level = 'loud'", "daemon.log_level is \"loud\"; 'debug', 'info', 'warning' or 'error' is needed"),
    ],
)
def test_a_refusal_names_key_value_and_limit(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).endswith(f".toml: {message}")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[limits]\nsessions_max = 0\n[arena]\nslab_bytes = 1\n[mover]\nlane = 1")
    assert "limits.sessions_max is 0" in message
    assert "arena.slab_bytes is 1; at least 2097152 is needed" in message
    assert "mover.lane is unknown" in message
    assert "arena_bytes" not in message


def test_a_volume_may_be_named_once_only_whatever_the_spelling(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.touch()
    link = tmp_path / "link"
    link.symlink_to(disk)
    for second in (disk, link, tmp_path / ".." / tmp_path.name / "disk"):
        message = refusal(tmp_path, f"[[volume]]\npath = '{disk}'\n[[volume]]\npath = '{second}'")
        assert message.endswith(f': volume[1].path is "{second}"; volume[0] is the same file')
    load(tmp_path, f"[[volume]]\npath = '{disk}'\n[[volume]]\npath = '{disk}2'")


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "192.168.1.4:9464", "[::]:9464", "example.org:80", ":9464"])
def test_metrics_are_served_on_loopback_only(tmp_path: Path, address: str) -> None:
    assert "only a loopback address" in refusal(tmp_path, f"[daemon]\nmetrics_listen = '{address}'")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4317", "http://[::1]:4317", "http://localhost:4317", "https://collector.example.org:4317", ""])
def test_a_collector_is_reached_on_loopback_or_encrypted(tmp_path: Path, endpoint: str) -> None:
    assert load(tmp_path, f"[tracing]\nendpoint = '{endpoint}'").tracing.endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:4317", "http://0.0.0.0:4317", "http://collector.example.org:4317"])
def test_spans_do_not_leave_the_machine_in_the_clear(tmp_path: Path, endpoint: str) -> None:
    message = refusal(tmp_path, f"[tracing]\nendpoint = '{endpoint}'")
    assert f'tracing.endpoint is "{endpoint}"; without encryption only a loopback address' in message


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4317",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:4317/v1/traces",
        "grpc://127.0.0.1:4317",
        "http://user:secret@127.0.0.1:4317",
        "http://:4317",
        "https://",
        "http://127.0.0.1:x",
        "http://[::1:4317",
        "http://127.0.0.1:4317?x",
        "http://127.0.0.1:4317#x",
    ],
)
def test_a_collectors_address_that_is_none_is_refused_by_its_key(tmp_path: Path, endpoint: str) -> None:
    assert f'tracing.endpoint is "{endpoint}"; http://HOST:PORT or https://HOST:PORT is needed' in refusal(tmp_path, f"[tracing]\nendpoint = '{endpoint}'")


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("root_ratio", "1.1", "at most 1"),
        ("root_ratio", "-0.1", "at least 0"),
        ("spans_per_s_max", "0", "at least 1"),
        ("queue_spans_max", "15", "at least 16"),
    ],
)
def test_limits_of_tracing_are_held(tmp_path: Path, key: str, value: str, limit: str) -> None:
    assert f"tracing.{key} is {value}; {limit}" in refusal(tmp_path, f"[tracing]\n{key} = {value}")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:x"])
def test_a_metrics_address_without_a_port_is_refused(tmp_path: Path, address: str) -> None:
    assert "HOST:PORT" in refusal(tmp_path, f"[daemon]\nmetrics_listen = '{address}'")


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:9464", ("::1", 9464)), ("localhost:1", ("localhost", 1)), ("", None)],
)
def test_loopback_addresses_are_split(tmp_path: Path, text: str, address: tuple[str, int] | None) -> None:
    assert load(tmp_path, f"[daemon]\nmetrics_listen = '{text}'").daemon.metrics_address == address


def test_a_runtime_directory_too_deep_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = "/" + "d" * (107 - len("/offloadd.sock") - 1)
    load(tmp_path, f"[daemon]\nruntime_dir = '{fits}'")
    assert "paths of 108 bytes; 107 is the limit" in refusal(tmp_path, f"[daemon]\nruntime_dir = '{fits}d'")
    monkeypatch.setenv("OFFLOADD_RUNTIME_DIR", f"{fits}d")
    with pytest.raises(ConfigError, match=r"the default configuration: runtime_dir .*108 bytes"):
        load_config(None)


def test_a_missing_file_and_a_broken_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.toml")
    assert "is not TOML" in refusal(tmp_path, "[limits")
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "latin.toml")


def test_the_configuration_can_not_be_changed_after_the_check() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().limits.sessions_max = 10**9


def test_every_key_says_what_it_is_for() -> None:
    for section in (Config, DaemonConfig, LimitsConfig, ArenaConfig, MoverConfig, VolumeConfig):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("memory_bytes", "arena_bytes"), [(64 * GIB, GIB), (4 * GIB, 512 * MIB), (3 * GIB, 384 * MIB), (1500 * MIB, 128 * MIB), (100 * MIB, 64 * MIB)]
)
def test_the_default_arena_leaves_most_of_the_memory(memory_bytes: int, arena_bytes: int) -> None:
    assert default_arena_bytes(64 * MIB, memory_bytes) == arena_bytes


def test_the_default_arena_follows_the_slab_size(tmp_path: Path) -> None:
    assert load(tmp_path, "[arena]\nslab_bytes = '1 GiB'").arena.arena_bytes % GIB == 0
