"""A DSPARK decode step: plan, draft or skip, admit, verify, accept, commit, learn.

Nothing here depends on a device: `device.Device` is the interface of one.
"""
