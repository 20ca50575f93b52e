"""Provide helpers independent of DSpark: files, hashes, cached machine code, the machine."""
