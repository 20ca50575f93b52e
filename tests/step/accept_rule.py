"""The accept rule that a test configures, of the step on a CPU or of the one on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from sglang_dspark.serving.config import CONFIG_VARIABLE


@contextmanager
def configured(
    module: ModuleType, rule: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """`verify.rule` as `module.sampled_rule` reads it, which keeps what it read."""
    path = folder / "dspark.yaml"
    path.write_text(f"verify: {{rule: {rule}}}\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    module.sampled_rule.cache_clear()
    yield
    module.sampled_rule.cache_clear()
