"""Provide the package's models: the demo target (built on this machine) and the drafters.

All modules but `simulated` load without torch, so a command can locate a model quickly.
"""
