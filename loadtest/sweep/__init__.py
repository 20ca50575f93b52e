"""Sweeps: configuration, plan, cells, run folder and summary."""
