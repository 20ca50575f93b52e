"""Evaluation: the reference decoding engine and acceptance statistics.

`target` and `engine` decode in plain torch, `records` is what they keep, `statistics` turns it into
numbers, `served` reads the same counts from a server's answers, `prompts` reads what both are
given, `report` puts the numbers side by side.
"""
