"""The process that moves bytes: one per device."""
