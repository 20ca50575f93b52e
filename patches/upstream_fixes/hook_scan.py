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


_walked: dict[int, ModuleType] = {}  # by id, unique while the reference exists
_names: dict[int, list[tuple[ModuleType, str]]] = {}  # where an object is held, by its id


@SEAMS.set(
    "hook-scan",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    expected_repr="<function _propagate_patch>",
    why="each hook walks all modules: 3.6 s in each of three processes of every start",
    issue="sgl-project/sglang#21388",
    drop_when="upstream walks sys.modules once in HookRegistry.apply_hooks",
)
def propagate(original: Any, wrapped: Any, source_module: Any) -> int:
    """Rebind as `_propagate_patch` does: in all modules but the object's own; return the count.

    Each module is walked once, until `forget` discards the record.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and id(module) not in _walked:
            _walk(module)
    count, places = 0, _names.get(id(original), [])
    for module, name in places:
        # The name may have changed since the walk, and its id may belong to another object.
        if module is source_module or vars(module).get(name) is not original:
            continue
        setattr(module, name, wrapped)
        count += 1
    _names.setdefault(id(wrapped), []).extend(places)  # a later hook may wrap it again
    return count


def _walk(module: ModuleType) -> None:
    """Record where a module holds functions, classes and other objects."""
    _walked[id(module)] = module
    if module.__name__.partition(".")[0] in _OTHERS:
        return
    for name, value in list(vars(module).items()):
        if type(value) not in _PLAIN:
            _names.setdefault(id(value), []).append((module, name))


def forget() -> None:
    """Discard the record once all hooks are applied: modules continue to change."""
    _walked.clear()
    _names.clear()
