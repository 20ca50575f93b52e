"""Benchmarks of the kernels: the shapes they are tried on, other implementations, rooflines."""
