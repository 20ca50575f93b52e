"""Rebind names that hold a hooked object after one walk over all modules, not one walk a hook.

Upstream: sglang/srt/plugins/hook_registry.py `_propagate_patch`. It walks `sys.modules` for each
hook, 75 ms for 7,500 modules: 3.6 s of CPU for 48 hooks, in each of a server's three processes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
# No hook wraps these, and modules hold many. Only types are compared: reading an attribute of a
# lazy object imports the module behind it.
_PLAIN = {str, int, float, bool, bytes, dict, list, tuple, set, frozenset, type(None), ModuleType}
# Most modules of a server. They import no name from SGLang.
_OTHERS = {
    *("torch", "transformers", "sympy", "mpmath", "numpy", "scipy", "numba", "llvmlite", "triton"),
    *("aiohttp", "huggingface_hub", "openai", "pydantic", "rich", "urllib3"),
}


class Places:
    """Record where modules hold functions, classes and other objects; walk each module once."""

    def __init__(self) -> None:
        self._walked: dict[int, ModuleType] = {}  # by id, unique while the reference exists
        self._names: dict[int, list[tuple[ModuleType, str]]] = {}  # by the held object's id

    def rebind(self, original: Any, wrapped: Any, source: Any) -> int:
        """Put `wrapped` in place of `original` in all modules but its own; return the count."""
        self._walk()
        count, places = 0, self._names.get(id(original), [])
        for module, name in places:
            # The name may have changed since the walk, and its id may belong to another object.
            if module is source or vars(module).get(name) is not original:
                continue
            setattr(module, name, wrapped)
            count += 1
        self._names.setdefault(id(wrapped), []).extend(places)  # a later hook may wrap it again
        return count

    def _walk(self) -> None:
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or id(module) in self._walked:
                continue
            self._walked[id(module)] = module
            if module.__name__.partition(".")[0] in _OTHERS:
                continue
            for name, value in list(vars(module).items()):
                if type(value) not in _PLAIN:
                    self._names.setdefault(id(value), []).append((module, name))


_places: list[Places] = []


@SEAMS.set(
    "hook-scan",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    expected_repr="<function _propagate_patch>",
    why="each hook walks all modules: 3.6 s in each of three processes of every start",
    issue="sgl-project/sglang#21388",
    drop_when="upstream walks sys.modules once in HookRegistry.apply_hooks",
)
def propagate(original: Any, wrapped: Any, source_module: Any) -> int:
    """Rebind as `_propagate_patch` does, by one walk; `forget` discards its record."""
    if not _places:
        _places.append(Places())
    return _places[0].rebind(original, wrapped, source_module)


def forget() -> None:
    """Discard the record once all hooks are applied: modules continue to change."""
    _places.clear()
