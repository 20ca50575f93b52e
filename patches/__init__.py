"""Patches of upstream SGLang: one file per patch, each with its target, signature and reason.

`step` puts the decode step into SGLang; `cpu` and `cuda` are imported on that device alone;
`upstream_fixes` mends what is wrong in SGLang without any speculation. `registry.install` checks
every signature before it touches anything and `registry.verify` proves afterwards that each patch
took.
"""

from __future__ import annotations

import importlib
import pkgutil

from sglang_dspark.patches.seam import Seam

FOLDERS = ("cpu", "cuda", "step", "upstream_fixes")


def all_seams(*, device: str | None = None) -> tuple[Seam, ...]:
    """Return the seams of every patch module, in order of the module's name, then of its `SEAMS`.

    device: `cpu` or `cuda` leaves out the folder of the other, `none` those of both: they are not
    even imported. None: all of them.
    """
    seams: list[Seam] = []
    for name in patch_modules():
        if device is not None and name.split(".")[0] in {"cpu", "cuda"} - {device}:
            continue
        seams.extend(importlib.import_module(f"{__name__}.{name}").SEAMS)
    return tuple(seams)


def patch_modules() -> tuple[str, ...]:
    """Return the names of the patch modules below this package, sorted."""
    found: list[str] = []
    for folder in FOLDERS:
        package = importlib.import_module(f"{__name__}.{folder}")
        found += (f"{folder}.{info.name}" for info in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(found))
