"""When each job goes to its lane: queues in, plans out; no I/O, no clock, no threads."""
