"""Fix faults of SGLang that are unrelated to speculation.

Each seam names the public issue and when to drop it. `upstream_fixes: false` installs none.
"""
