"""What a patch of upstream is: where it bites, what must stand there, and why we need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace", "set"]


@dataclass(frozen=True)
class Seam:
    """One patch of one upstream attribute.

    name: short id, shown by `dspark doctor` (`cpu-row-argmax`).
    target: dotted path of the attribute as its consumer sees it.
    kind: `before`, `after`, `around`, `replace` as in SGLang's HookRegistry; `set` assigns `hook`
        itself, for names that are None or a constant on this device and cannot be wrapped.
    hook: the callable or value put there, in the calling convention of `kind`.
    signature: `str(inspect.signature(target))` with annotations removed, in the supported version;
        None only for `set`, where `expected_repr` says what stands there now.
    why: one sentence on what breaks or is missing without it.
    device: `cpu` seams are installed only where our CPU platform is active, `cuda` seams only where
        SGLang serves on an NVIDIA GPU.
    """

    name: str
    target: str
    kind: Kind
    hook: Callable[..., Any] | Any
    why: str
    signature: str | None = None
    expected_repr: str | None = None
    device: Literal["any", "cpu", "cuda"] = "any"
