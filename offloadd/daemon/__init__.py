"""The daemon: the one place that names concrete classes, starts them in order and stops them in reverse."""
