"""What the daemon counts, and the endpoint that shows it."""

from offloadd.metrics.registry import Metrics
from offloadd.metrics.server import MetricsServer

__all__ = ["Metrics", "MetricsServer"]
