"""Hash the weights and the tokenizer of a model directory, so that a mismatch is rejected."""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.common.hashes import named_sha256
from sglang_dspark.errors import DSparkError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def target_sha256(path: Path) -> str:
    """Return SHA-256 over the names and bytes of a model directory's weight files.

    Raises DSparkError if it has no weights.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DSparkError(f"no safetensors weights in {path}")
    return named_sha256(files)


def tokenizer_sha256(path: Path) -> str:
    """Return SHA-256 of tokenizer and chat template. Raises DSparkError without a tokenizer."""
    files = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        raise DSparkError(f"no tokenizer in {path}: expected one of {', '.join(_TOKENIZER_FILES)}")
    templates = [path / name for name in _TEMPLATE_FILES if (path / name).is_file()]
    return named_sha256(files + templates)
