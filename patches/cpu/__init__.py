"""Patches of SGLang on a CPU."""
