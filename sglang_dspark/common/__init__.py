"""Helpers of any program, nothing of DSpark: files, hashes, cached machine code, the machine."""
