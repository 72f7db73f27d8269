"""The grid of the restore benchmark: blocks of real models, evicted and restored by every path that a machine has, each row beside its ceiling."""
