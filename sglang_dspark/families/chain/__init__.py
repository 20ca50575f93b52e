"""Drafters of one layer that run once per token: the base of Eagle3 and MTP, not a family."""
