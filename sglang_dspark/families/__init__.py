"""Drafter families: one folder for each, one line in `registry` to add one.

A folder holds all parts of a family: its config and module, reading and writing its checkpoints,
its proposer for the reference engine, its options and its learner for training. `learning` and
`chain` hold the parts that several families share.
"""
