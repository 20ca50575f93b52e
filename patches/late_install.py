"""Install a patch when its target's module is imported, for `dspark doctor --serve`.

Loaded modules have their patches, as at a start; modules that are not loaded affect no result.
Targets of waiting patches are not compared with their signatures. So patches wait only where all
files of SGLang are those of the release, and where no other plugin patches them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from importlib import metadata

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches import registry
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import on_demand, released_files, startup, upstream, upstream_check


def can_wait() -> bool:
    """Return whether patches may wait in this process."""
    plugins = metadata.entry_points(group="sglang.srt.plugins")
    return on_demand.active() and len(plugins) == 1 and released_files.are_unchanged()


def install(seams: Iterable[Seam]) -> None:
    """Install the seams of loaded modules as `registry.install` does; the others wait."""
    ready: list[Seam] = []
    waiting: dict[str, list[Seam]] = {}
    for seam in seams:
        module = _module_of(seam.target)
        if module is None or module in sys.modules:
            ready.append(seam)
        else:
            waiting.setdefault(module, []).append(seam)
    registry.install(ready)
    on_demand.report_imports(waiting, partial(_install_late, waiting))


def _install_late(waiting: dict[str, list[Seam]], modules: list[str]) -> None:
    """Install the seams of modules that were imported; a mismatch ends the process."""
    try:
        registry.install([seam for module in modules for seam in waiting[module]])
    except DSparkError as error:
        startup.stop(str(error))
    upstream.HookRegistry.apply_hooks()  # verifies them too (plugin.py)


def _module_of(target: str) -> str | None:
    """Return the module of SGLang that a dotted path begins with; None for other packages."""
    parts = target.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts) - 1, 1, -1))
    return next((name for name in names if upstream_check.has_module(name)), None)
