"""The parts of `bench.gpu_figures`."""
