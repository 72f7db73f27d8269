"""The process that keeps one volume: lock, superblock, namespace table, slab headers, start-up scan."""
