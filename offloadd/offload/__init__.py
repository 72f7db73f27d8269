"""The use cases: evict, restore, lookup; and the processes that carry them out."""
