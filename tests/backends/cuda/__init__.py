"""The device side of the step for accelerators, as far as a CPU shows it."""
