"""Patches on SGLang's own functions for one test, as the registry applies them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable

import pytest
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_dspark.patches import registry
from sglang_dspark.patches.seam import Seam


def put_in(monkeypatch: pytest.MonkeyPatch, seams: Iterable[Seam]) -> None:
    """Apply `seams` until the test's end. Importers by value keep the original."""
    for seam in seams:
        path, _, name = seam.target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = inspect.getattr_static(owner, name)
        if seam.kind == "subclass":
            monkeypatch.setattr(owner, name, registry.derive(original, seam.hook))
            continue
        kept = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        wrapped = _wrap_fn(original.__func__ if kept else original, seam.hook, HookType(seam.kind))
        monkeypatch.setattr(owner, name, kept(wrapped) if kept else wrapped)
