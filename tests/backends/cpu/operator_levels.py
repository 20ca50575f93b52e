"""Run a module's C++ operators at one instruction set, or its torch code without them."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest

from sglang_dspark.backends.cpu import csrc

_LOADED = csrc.library()
# The last level requires AVX-512 on x86-64.
_MISSING = 1 if _LOADED is not None and not _LOADED.dspark_processor() & 2 else 0
_COUNT = 0 if _LOADED is None else max(1, len(csrc.OPERATOR_LEVELS) - _MISSING)
LEVELS = csrc.OPERATOR_LEVELS[:_COUNT]


def force_level(patch: pytest.MonkeyPatch, module: ModuleType, level: str | None) -> None:
    """Bind operators of `module` for a level of LEVELS; None: as without the library."""
    found = partial(csrc.operator, level=level)
    patch.setattr(module, "operator", found if level else lambda *_, **kinds: None)
