"""Who made a file: hashes and versions, so that a mismatch is refused instead of served."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sglang_dspark.errors import DSparkError


def target_sha256(path: Path) -> str:
    """SHA-256 over the names and bytes of a model directory's weight files.

    Raises DSparkError when there are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DSparkError(f"no safetensors weights in {path}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
