"""The configuration: every limit with its unit, checked once at load."""

from offloadd.config.load import load_config
from offloadd.config.schema import ArenaConfig, BreakerConfig, Config, DaemonConfig, GpuConfig, LimitsConfig, MoverConfig, TracingConfig, VolumeConfig
from offloadd.config.sizes import parse_size

__all__ = [
    "ArenaConfig",
    "BreakerConfig",
    "Config",
    "DaemonConfig",
    "GpuConfig",
    "LimitsConfig",
    "MoverConfig",
    "TracingConfig",
    "VolumeConfig",
    "load_config",
    "parse_size",
]
