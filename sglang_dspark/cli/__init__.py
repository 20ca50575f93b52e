"""Provide the command-line entry points; no other module of the package imports this one."""
