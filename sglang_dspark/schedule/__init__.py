"""From drafts to verify lengths: survival, calibration, budget, admission (paper, 3.2).

In use so far: survival and its calibration. Every drafted token is still verified.
"""
