"""Benchmarks: each module answers the one question in its docstring. `python -m bench.NAME [--tiny]`, or `make bench` for all."""
