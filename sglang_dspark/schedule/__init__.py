"""From drafts to verify lengths: survival, budget, admission (paper, 3.2).

Not in use yet: every drafted token is verified.
"""
