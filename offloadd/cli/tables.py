"""Tables that read well at 80 columns."""

from rich import box
from rich.table import Table
from rich.text import Text


def table(*columns: str, title: str = "") -> Table:
    """A table with a line under its header. A column name that starts with ">" is aligned to the right."""
    made = Table(title=title or None, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return made


def plain(text: str) -> Text:
    """Text from elsewhere: neither markup nor control characters of it reach the terminal."""
    return Text("".join(character if character.isprintable() else "�" for character in text))


def format_duration(seconds: float) -> str:
    """Two units at most: `3 d 4 h`, `12 min 5 s`, `7 s`."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole % 86400 // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2])
