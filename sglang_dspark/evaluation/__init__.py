"""Evaluation: the reference decoding engine, acceptance statistics, and analyses of drafters.

`target` and `engine` decode in plain torch, `records` is what they keep, `statistics` turns it into
numbers, `served` reads the same counts from a server's answers, `prompts` reads what both are
given, `report` puts the numbers side by side.
`recording` runs the engine into a `traces` file, from which the paper's figures are made by
`analyses`, one module each; `calibration_data` and `resampling` give them labels and intervals.
`figures` draws their results and `page` gathers them.
"""
