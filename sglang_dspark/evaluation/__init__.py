"""Evaluation: the reference decoding engine, acceptance statistics, and analyses of drafters.

`target` and `engine` decode in plain torch, `records` is what they keep, `statistics` turns it into
numbers, `served` reads the same counts from a server's answers, `prompts` reads what both are
given, `report` puts the numbers side by side.
`recording` runs the engine into a `traces` file, from which the paper's figures are made:
`analyses` (tau, positions, depth, length, thresholds), `reliability` (calibration, ROC-AUC) with
`calibration_data`; `overhead` times the sequential loop; `resampling` gives intervals. `figures`
draws the results and `page` gathers them.
"""
