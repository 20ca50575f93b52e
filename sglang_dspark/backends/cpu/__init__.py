"""Run SGLang on a machine without an accelerator: platform, attention, kernels.

`boot.activate` is the entry point of the group `sglang.srt.platforms`; it does nothing on a machine
with an accelerator. The patches of this package are in `patches/cpu`.
"""
