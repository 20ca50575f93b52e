"""SGLang on a machine without an accelerator: platform, attention, kernels.

`boot.activate` is the entry point of the group `sglang.srt.platforms`; it leaves every machine
with an accelerator alone. The patches that belong to it are `patches/cpu_*.py`.
"""
