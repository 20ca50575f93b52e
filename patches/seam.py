"""Describe one patch of SGLang: its target, the expected signature there, and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace", "set", "subclass"]
# Base of a `subclass` hook. SGLang's class takes its place when the hook is installed.
Upstream: Any = object


@dataclass(frozen=True)
class Seam:
    """One patch of one upstream attribute.

    name: short id, shown by `dspark doctor` (`cpu-row-argmax`).
    target: dotted path of the attribute as its consumer sees it.
    kind: `before`, `after`, `around`, `replace` as in SGLang's HookRegistry; `set` assigns `hook`
        itself, for names that are None or a constant on this device and cannot be wrapped;
        `subclass` puts a class derived from `hook` and upstream's class in its place.
    hook: the callable or value put there, in the calling convention of `kind`. For `subclass` a
        class with upstream's methods: their own signatures state what upstream's have to be, and
        `super()` calls upstream's. A flag overrides its opposite; annotated attributes are new.
    signature: `str(inspect.signature(target))` with annotations removed, in the supported version;
        None only for `set` and `subclass`.
    expected_repr: `repr(target)` without addresses, for `set`.
    why: one sentence on what breaks or is missing without it.
    device: `cpu` seams are installed only where our CPU platform is active, `cuda` seams only where
        SGLang serves on an NVIDIA GPU.
    issue: public thread on the fault, or on the change that made it: `sgl-project/sglang#N` or a
        URL; several with a comma; `none found (DATE)` after a search without result. Required in
        `upstream_fixes`, as is `drop_when`.
    drop_when: the change of upstream that makes the patch unnecessary.
    """

    name: str
    target: str
    kind: Kind
    hook: Any
    why: str
    signature: str | None = None
    expected_repr: str | None = None
    device: Literal["any", "cpu", "cuda"] = "any"
    issue: str = ""
    drop_when: str = ""
