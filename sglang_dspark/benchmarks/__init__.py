"""Benchmarks of the kernels: their test shapes, other implementations, rooflines."""
