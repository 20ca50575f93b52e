"""A faked GPU on which servers start, compile and answer without a real one (tools/gpu/README)."""
