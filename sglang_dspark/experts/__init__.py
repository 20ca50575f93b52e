"""Routed experts of a drafter: implementations, the choice among them, and the split over ranks."""
