"""From drafts to verify lengths: survival, calibration, budget, admission (paper, 3.2).

Pure functions and small states; `step` runs them in a server.
"""
