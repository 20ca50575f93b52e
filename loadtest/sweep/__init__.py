"""A sweep: its configuration, plan and cells, its folder, and what they say together."""
