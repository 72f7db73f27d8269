"""The machine as its files under /proc, /sys and /dev tell, under a root that tests replace."""
