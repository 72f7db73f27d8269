"""Which block is where: a state machine without I/O, clocks or threads."""
