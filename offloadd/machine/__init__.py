"""What the kernel tells of the machine in files that never hang: its mounts and block devices."""
