"""Fix faults of SGLang that have nothing to do with speculation.

Each seam names the public issue and when to drop it. `upstream_fixes: false` installs none.
"""
