"""Patch SGLang on an NVIDIA GPU."""
