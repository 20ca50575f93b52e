"""Patches of upstream SGLang: one file per seam, each with target, versions, why and signature.

`all_seams()` is the whole list; `registry.install` checks every signature before it touches
anything and `registry.verify` proves afterwards that each patch took.
"""

from __future__ import annotations

import importlib
import pkgutil

from sglang_dspark.patches.seam import Seam

_NOT_PATCHES = frozenset({"registry", "seam", "seam_report"})


def all_seams(*, device: str | None = None) -> tuple[Seam, ...]:
    """The seams of every patch module, in order of module name, then of its `SEAMS`.

    device: `cpu` or `cuda` leaves out the modules of the other, `none` those of both: they are not
    even imported. None: all of them.
    Raises AttributeError when a module of this package defines no `SEAMS`.
    """
    seams: list[Seam] = []
    for name in patch_modules():
        if device is not None and name.split("_")[0] in {"cpu", "cuda"} - {device}:
            continue
        module = importlib.import_module(f"{__name__}.{name}")
        seams.extend(module.SEAMS)
    return tuple(seams)


def patch_modules() -> tuple[str, ...]:
    """Names of the patch modules of this package, sorted."""
    found = (info.name for info in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if name not in _NOT_PATCHES))
