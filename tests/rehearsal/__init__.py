"""CUDA's side of the step in real servers on a CPU: only the device itself is replaced."""
