"""Command-line entry points; nothing in the package imports this one."""
