"""The checks themselves: each reads a `System` and yields findings about its subject."""
