"""offloadd: a node-local daemon that evicts KV cache blocks from engine memory, keeps them, and restores them verified."""

__version__ = "0.1.0"
