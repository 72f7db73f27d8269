"""`offloadd` that takes a driver for hung, and tries again, after other times than usual. Usage: HELLO_TIMEOUT_S RETRY_PAUSE_S serve --config FILE."""

import sys

from offloadd.cli.main import run
from offloadd.offload import mover_link

if __name__ == "__main__":
    mover_link.HELLO_TIMEOUT_S, mover_link.RETRY_PAUSE_S = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    run()
