"""More than one process, or machine, where docs/parallel.md says so: its commands, run."""
