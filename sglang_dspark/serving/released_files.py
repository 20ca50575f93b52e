"""Compare SGLang's files with those of the one supported release.

Tests check every patch of ours, and the tables of names in upstream.py, against that release. If
no file differs, a patch fits even if its target is not imported.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

# Of SUPPORTED_SGLANG; `python -m tools.upstream_hashes` prints that of the installed one.
RELEASE = "7b6b0e35a1222b50"
_HASH_DIGITS = 16  # of the sha256, enough to detect a change


def are_unchanged() -> bool:
    """Return whether all modules of SGLang's runtime are those of the release."""
    return digest() == RELEASE


def digest() -> str | None:
    """Return the hash of names and contents of all modules; None where there is no SGLang."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix().encode()
        found.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:_HASH_DIGITS]
