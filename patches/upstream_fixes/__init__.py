"""Fix faults of SGLang that have nothing to do with speculation."""
