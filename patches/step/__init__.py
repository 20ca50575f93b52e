"""Add the decode step to SGLang, on every device."""
