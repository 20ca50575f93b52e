"""Evaluation: the reference decoding engine, acceptance statistics, and the same through a server.

`target` and `engine` decode in plain torch, `records` is what they keep, `statistics` turns it into
numbers, `served` reads the same counts from the answers of a server, `prompts` reads what both are given,
`report` puts the numbers side by side.
"""
