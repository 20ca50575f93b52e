"""From drafts to verify lengths: survival, calibration, budget, admission (paper, 3.2).

Pure functions and small states. Servers do not use the planner yet: every drafted token is still
verified there.
"""
