"""The CUDA driver as the mover uses it: devices, memory, streams, copies. Importing it loads nothing of CUDA."""
