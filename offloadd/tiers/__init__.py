"""What a tier is made of: the volume's format and I/O, and the arena's memory."""
