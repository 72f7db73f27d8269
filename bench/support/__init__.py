"""What the benchmarks share: the record of a result, workloads, and processes to measure."""
