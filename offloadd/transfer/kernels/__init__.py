"""Gather, scatter and CRC32C where the payloads lie: CUDA kernels, and their NumPy twin."""
