"""Stubs by which `tools/gpu/pack` replaces some of SGLang's files."""
