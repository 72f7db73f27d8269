"""Memory shared between processes: sealed memfds, their mappings, and views of engine memory by block."""
