"""The servers under load: child processes, their flags, their cores."""
