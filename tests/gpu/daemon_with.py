"""`offloadd` with other numbers than it has, so that tests need not wait as long. Usage: MODULE.NAME=NUMBER… offloadd's own arguments."""

import importlib
import sys

from offloadd.cli.main import run


def command(**numbers: float) -> tuple[str, ...]:
    """For `DaemonProcess`. Names have two underscores before that of the number: `mover_link__HELLO_TIMEOUT_S`, of modules of `offloadd.offload`."""
    return ("-m", __name__, *(f"{name.replace('__', '.', 1)}={number}" for name, number in numbers.items()), "serve", "--config")


if __name__ == "__main__":
    while "=" in sys.argv[1]:
        name, _, text = sys.argv.pop(1).partition("=")
        module, _, number = name.partition(".")
        target = importlib.import_module(f"offloadd.offload.{module}")
        setattr(target, number, type(getattr(target, number))(text))
    run()
