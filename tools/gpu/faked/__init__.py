"""A faked GPU, under which servers start, compile and answer without one: `tools/gpu/README.md`."""
