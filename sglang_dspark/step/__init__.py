"""A DSPARK decode step: plan, draft or skip, admit, lay out, verify, accept, commit, learn.

Nothing here knows a device; what differs between them stands behind `device.Device`.
"""
