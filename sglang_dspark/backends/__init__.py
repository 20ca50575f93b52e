"""Run the decode step on each kind of device: CPUs, NVIDIA GPUs, and experts on both."""
