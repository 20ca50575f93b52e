"""Triton operators, one a file, each with a torch reference."""
