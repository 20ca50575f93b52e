"""Patches of SGLang on an NVIDIA GPU."""
