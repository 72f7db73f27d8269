"""Spans of calls for an OpenTelemetry collector. Imported only where the configuration names one; needs the extra `otel`."""
