"""Patch SGLang on a CPU."""
