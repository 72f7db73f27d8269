"""One frame of `offloadd top`, from two answers of the daemon: what it holds is the later one's, and rates are what lies between the two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from offloadd.cli.grid import Column, crop, fair_shares, grid
from offloadd.cli.tables import format_duration, plain
from offloadd.units import format_bytes

Values = dict[str, Any]

#: What is not known yet, since one answer tells no rate; and nothing.
UNKNOWN, NOTHING = "…", "-"
#: From this width on there is room for more columns.
WIDE = 110


@dataclass(frozen=True, slots=True)
class Interval:
    """What two answers of one daemon differ by, as `values_of` gives them. `before` None: there is nothing to compare with."""

    before: Values | None
    now: Values

    @classmethod
    def of(cls, before: Values | None, now: Values) -> "Interval":
        """An answer of another daemon, or an older one, says nothing about the time since."""
        same = before is not None and before["pid"] == now["pid"] and before["uptime_s"] < now["uptime_s"]
        return cls(before if same else None, now)

    @property
    def seconds(self) -> float:
        """By the daemon's clock: how long an answer was on its way does not count."""
        return self.now["uptime_s"] - self.before["uptime_s"] if self.before is not None else 0.0

    def grown(self, get: Callable[[Values], int]) -> int | None:
        """How much a count has grown; None if that is not known."""
        return get(self.now) - get(self.before) if self.before is not None else None

    def rate(self, get: Callable[[Values], int]) -> float | None:
        """The same by the second."""
        grown = self.grown(get)
        return None if grown is None else grown / self.seconds


def frame(interval: Interval, *, width: int, height: int, notice: str = "", right: str = "") -> list[Text]:
    """At most `height` lines of at most `width` cells. `notice`: a line of its own, for what the daemon does not tell; `right`: at the end of the first."""
    now = interval.now
    head = _head(interval, width, right)
    if notice:
        head.append(crop(Text(notice, style="bold yellow"), width))
    tables = [
        _Table(_tier_columns(width), [_arena(interval, width), *(_volume(interval, volume, width) for volume in now["volumes"])], "tiers"),
        _Table(_session_columns(width), [_session(interval, number, width) for number in range(len(now["sessions"]))], "sessions"),
        _Table(_worker_columns(width), [_worker(worker, now["gpus"]) for worker in now["workers"]], "workers"),
    ]
    return _fit(head, _classes(interval, width), tables, width, height)


@dataclass(frozen=True, slots=True)
class _Row:
    """`rank`: the lower, the sooner it is shown where there is no room for all."""

    cells: list[Text | str]
    rank: float = 0.0


@dataclass(frozen=True, slots=True)
class _Table:
    columns: list[Column]
    rows: list[_Row]
    what: str

    def lines(self, count: int, width: int) -> list[Text]:
        """The titles and so many lines: all rows in their own order, or those that are not well, or do most, first, since these are what is looked for."""
        if not self.rows:
            return [*grid(self.columns, [], width), Text(f"no {self.what}", style="dim")]
        if count >= len(self.rows):
            return grid(self.columns, [row.cells for row in self.rows], width)
        kept = sorted(self.rows, key=lambda row: row.rank)[: count - 1]
        more = Text(f"{UNKNOWN} {len(self.rows) - len(kept)} more {self.what}", style="dim")
        return [*grid(self.columns, [row.cells for row in kept], width), more]


def _fit(head: list[Text], classes: list[Text], tables: list[_Table], width: int, height: int) -> list[Text]:
    wanted = [max(1, len(table.rows)) for table in tables]
    for gap in (1, 0):
        # A table has a line of titles, and an empty one before it while there is room.
        left = height - len(head) - gap - len(classes) - len(tables) * (1 + gap)
        if left >= sum(wanted):
            break
    blank = [Text()] * gap
    lines = [*head, *blank, *classes]
    for table, count in zip(tables, fair_shares(wanted, max(0, left)), strict=True):
        if count:
            lines += [*blank, *table.lines(count, width)]
    return lines[:height]


# -- the head ------------------------------------------------------------------------------------------------------------------------


def _head(interval: Interval, width: int, right: str) -> list[Text]:
    now = interval.now
    first = Text("offloadd ", no_wrap=True)
    first.append_text(plain(now["version"]))
    first.append("  ")
    first.append(now["state"], style="bold green" if now["state"] == "SERVING" else "bold yellow")
    first.append(f"  up {format_duration(now['uptime_s'])}  pid {now['pid']}")
    first = crop(first, width)
    if first.cell_len + len(right) + 2 <= width:
        first.append(" " * (width - first.cell_len - len(right)))
        first.append(right, style="dim")
    full = _percent(now["block_count"], now["block_count_max"])
    second = f"{now['block_count']:,} of {now['block_count_max']:,} blocks ({full}), {now['held_count']:,} kept or leased; {_count(now['sessions'], 'session')}"
    third = (
        f"Hits now (since the start): lookups {_hits(interval, 'held_count', 'looked_up_count')}, restores {_hits(interval, 'restored_count', 'asked_count')}"
    )
    return [first, crop(Text(second), width), crop(Text(third), width)]


def _hits(interval: Interval, good: str, asked: str) -> str:
    hits = interval.now["hits"]
    of_now = interval.grown(lambda values: values["hits"][asked])
    good_now = interval.grown(lambda values: values["hits"][good])
    present = UNKNOWN if of_now is None or good_now is None else _percent(good_now, of_now)
    return f"{present} ({_percent(hits[good], hits[asked])})"


# -- the tables ----------------------------------------------------------------------------------------------------------------------


def _classes(interval: Interval, width: int) -> list[Text]:
    columns = [Column("class", 11, right=False), Column("done/s", 8), Column("moved", 9), Column("p50", 8), Column("p99", 8)]
    columns += [Column("waiting", 15), Column("in flight", 15)]
    rows = []
    for number, one in enumerate(interval.now["classes"]):
        mine = [queue for queue in interval.now["queues"] if queue["job_class"] == one["job_class"]]
        rows.append(
            [
                one["job_class"],
                _per_second(interval.rate(lambda values, number=number: values["classes"][number]["done_count"])),  # type: ignore[misc]
                _bytes_per_second(interval.rate(lambda values, number=number: values["classes"][number]["payload_bytes"])),  # type: ignore[misc]
                _time(one["p50_s"]) if one["recent_count"] else NOTHING,
                _time(one["p99_s"]) if one["recent_count"] else NOTHING,
                *_depth(mine),
            ]
        )
    return grid(columns, rows, width)


def _tier_columns(width: int) -> list[Column]:
    columns = [Column("tier", right=False, keep="end"), Column("state", 13, right=False), Column("blocks", 9), Column("used", 9), Column("full", 5)]
    columns += [Column("read", 9), Column("written", 9)]
    if width >= WIDE:
        columns[4:4] = [Column("size", 9)]
        columns += [Column("waiting", 15), Column("in flight", 15)]
    return columns


def _tier_cells(
    interval: Interval, name: str, state: Text, tier: Values, size_bytes: int, queue: str, get: Callable[[Values], Values], width: int
) -> list[Text | str]:
    cells: list[Text | str] = [name, state, f"{tier['block_count']:,}", _size(tier["used_bytes"]), _percent(tier["used_bytes"], size_bytes)]
    cells.append(_bytes_per_second(interval.rate(lambda values: get(values).get("read_bytes", 0))))
    cells.append(_bytes_per_second(interval.rate(lambda values: get(values).get("written_bytes", 0))))
    if width >= WIDE:
        cells[4:4] = [_size(size_bytes)]
        cells += _depth([one for one in interval.now["queues"] if one["volume"] == queue])
    return cells


def _arena(interval: Interval, width: int) -> _Row:
    arena = interval.now["arena"]
    state = Text("serving", style="green") if arena["arena_bytes"] else Text("none", style="dim")
    return _Row(_tier_cells(interval, "arena", state, arena, arena["arena_bytes"], "", lambda values: values["arena"], width))


def _volume(interval: Interval, volume: Values, width: int) -> _Row:
    off = [name for name in ("reads", "writes") if volume[f"{name}_breaker"].startswith("open")]
    trial = [name for name in ("reads", "writes") if volume[f"{name}_breaker"].startswith("half-open")]
    text, style = volume["state"].partition(":")[0], "yellow"
    if off:
        # By words: who sees no colours must see it, too.
        text, style = ("off" if len(off) == 2 else f"{off[0]} off"), "bold red"
    elif trial:
        text = f"{trial[0]} on trial"
    elif text == "serving":
        style = "green"
    elif text in ("failed", "retrying"):
        style = "bold red"
    path = volume["path"]
    cells = _tier_cells(
        interval, path, Text(text, style=style), volume, volume["volume_bytes"], path, lambda values: _named(values["volumes"], "path", path), width
    )
    return _Row(cells, rank=float(style == "green"))


def _session_columns(width: int) -> list[Column]:
    columns = [Column("session", 8, right=False), Column("instance", right=False), Column("pid", 7), Column("regions", 7), Column("mapped", 9)]
    columns += [Column("requests", 8), Column("evicts", 9), Column("restores", 9)]
    if width >= WIDE:
        columns[2:2] = [Column("tenant", 14, right=False)]
    return columns


def _session(interval: Interval, number: int, width: int) -> _Row:
    session = interval.now["sessions"][number]
    # One that came meanwhile has moved in this time all that it ever has.
    rates = [
        interval.rate(lambda values: _named(values["sessions"], "name", session["name"]).get("evicted_bytes", 0)),
        interval.rate(lambda values: _named(values["sessions"], "name", session["name"]).get("restored_bytes", 0)),
    ]
    cells: list[Text | str] = [session["name"], session["instance"], str(session["pid"]), str(session["region_count"]), _size(session["mapped_bytes"])]
    cells += [str(session["request_count"]), *(_bytes_per_second(rate) for rate in rates)]
    if width >= WIDE:
        cells[2:2] = [session["tenant"]]
    return _Row(cells, rank=-sum(rate or 0.0 for rate in rates) - session["request_count"])


def _worker_columns(width: int) -> list[Column]:
    return [Column("worker", right=False, keep="end"), Column("pid", 10), Column("restarts", 8), Column("", 40 if width >= WIDE else 26, right=False)]


def _worker(worker: Values, gpus: list[Values]) -> _Row:
    pid: Text | str = str(worker["pid"]) if worker["pid"] else Text("restarting", style="bold yellow")
    note: Text | str = worker["copies_by"] or worker["placement"]
    unusable = next((gpu["note"] for gpu in gpus if gpu["note"] and worker["name"] == f"mover {gpu['device']}"), "")
    if unusable:
        note = Text("GPU can't be used: ", style="bold red") + plain(unusable)
    return _Row([worker["name"], pid, str(worker["restart_count"]), note], rank=-worker["restart_count"] - 1000 * bool(unusable))


def _named(items: list[Values], key: str, name: str) -> Values:
    """The one with this name; nothing for one that was not there yet."""
    return next((one for one in items if one[key] == name), {})


# -- figures -------------------------------------------------------------------------------------------------------------------------


def _depth(queues: list[Values]) -> list[Text | str]:
    def shown(count: int, size_bytes: int) -> str:
        return f"{count:,} ({_size(size_bytes)})" if count else NOTHING

    totals = {name: sum(queue[name] for queue in queues) for name in ("ticket_count", "waiting_bytes", "job_count", "in_flight_bytes")}
    return [shown(totals["ticket_count"], totals["waiting_bytes"]), shown(totals["job_count"], totals["in_flight_bytes"])]


def _count(items: list[Any], word: str) -> str:
    return f"{len(items)} {word}{'' if len(items) == 1 else 's'}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else NOTHING


def _size(size_bytes: float) -> str:
    """With three digits at most that mean something: `10.2 MiB`, `1023 MiB`."""
    text = format_bytes(size_bytes)
    number, unit = text.split()
    return f"{float(number):.0f} {unit}" if float(number) >= 100 else text


def _per_second(rate: float | None) -> str:
    if rate is None:
        return UNKNOWN
    return NOTHING if rate == 0 else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _bytes_per_second(rate: float | None) -> str:
    """In powers of ten, as rates of drives are told."""
    if rate is None:
        return UNKNOWN
    if rate == 0:
        return NOTHING
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if rate < 999.5 or unit == "GB/s":
            return f"{rate:.0f} {unit}" if rate >= 99.95 or unit == "B/s" else f"{rate:.1f} {unit}"
        rate /= 1000
    raise AssertionError("unreachable")


def _time(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.0f} {unit}" if seconds * factor >= 99.95 or unit == "µs" else f"{seconds * factor:.1f} {unit}"
    return f"{seconds:.1f} s"
