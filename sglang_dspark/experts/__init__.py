"""Routed experts of a drafter: their implementations, which of them is taken, and their split."""
