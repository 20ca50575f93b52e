"""Evaluate drafters: the reference decoding engine, acceptance statistics, and analyses.

`target` and `engine` decode in plain torch and keep `records`, which `statistics` turns into
numbers. `served` reads the same counts from a server's answers, `prompts` reads the prompts of
both, and `report` compares the numbers.
`recording` runs the engine into a `traces` file, from which `analyses` makes the paper's figures,
one module each; `calibration_data` and `resampling` give them labels and intervals.
`figures` draws their results and `page` gathers them.
"""
