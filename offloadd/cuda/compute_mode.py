"""Who may use a GPU, as the driver and the management library number it."""

import enum


class ComputeMode(enum.IntEnum):
    """`nvidia-smi -c` sets it. EXCLUSIVE_PROCESS lets one process make contexts; the server of MPS is one, whatever the number of its clients."""

    DEFAULT = 0
    #: Of old drivers; to a newer one it is EXCLUSIVE_PROCESS.
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3

    @property
    def is_exclusive(self) -> bool:
        """Whether a second process is kept out, unless both are clients of MPS."""
        return self in (ComputeMode.EXCLUSIVE_THREAD, ComputeMode.EXCLUSIVE_PROCESS)
