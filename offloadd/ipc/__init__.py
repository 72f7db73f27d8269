"""Typed messages between the daemon's processes: msgpack over SEQPACKET socket pairs, never pickle."""
