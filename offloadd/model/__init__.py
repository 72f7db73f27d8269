"""Values that travel between the layers; no I/O, no protobuf."""
