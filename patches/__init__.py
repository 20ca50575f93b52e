"""Patch SGLang: one concept a file, each patch with its target, signature and reason.

`step` adds the decode step to SGLang. `cpu` and `cuda` are imported only on that device.
`upstream_fixes` fixes faults of SGLang; `upstream_fixes: false` in the configuration disables
them. `registry.install` checks every signature before it changes anything, and `registry.verify`
then proves that each patch is in place.
"""

from __future__ import annotations

import importlib
import pkgutil

from sglang_dspark.patches.seam import Seam


def all_seams(*, device: str | None = None, upstream_fixes: bool = True) -> tuple[Seam, ...]:
    """Return the seams of every patch module, in order of the module's name, then of its `SEAMS`.

    device: `cpu` or `cuda` skips the other's folder, `none` skips both; skipped folders are
    not imported. None: all folders. upstream_fixes: whether to include that folder.
    """
    skipped = set() if upstream_fixes else {"upstream_fixes"}
    if device is not None:
        skipped |= {"cpu", "cuda"} - {device}
    modules = [name for name in patch_modules() if name.split(".")[0] not in skipped]
    found = [importlib.import_module(f"{__name__}.{name}").SEAMS for name in modules]
    return tuple(seam for seams in found for seam in seams)


def patch_modules() -> tuple[str, ...]:
    """Return the names of the patch modules in the folders of this package, sorted."""
    prefix = f"{__name__}."
    found = (info.name.removeprefix(prefix) for info in pkgutil.walk_packages(__path__, prefix))
    return tuple(sorted(name for name in found if "." in name))
