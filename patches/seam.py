"""Describe the patches of SGLang: their targets, the expected signatures there, and reasons."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Literal, Protocol, TypeVar

Kind = Literal["before", "after", "around", "replace", "set", "subclass"]
Hook = TypeVar("Hook")
# Base of a `subclass` hook. SGLang's class replaces it when the hook is installed.
Upstream: Any = object
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Seam:
    """One patch of one upstream attribute.

    name: short id, shown by `dspark doctor` (`cpu-row-argmax`).
    target: dotted path of the attribute as its consumer sees it.
    kind: `before`, `after`, `around`, `replace` as in SGLang's HookRegistry; `set` assigns `hook`
        itself, for names that are None or a constant on this device and cannot be wrapped;
        `subclass` replaces the target by a class derived from `hook` and upstream's class.
    hook: the new callable or value, in the calling convention of `kind`. For `subclass` a
        class with upstream's methods: their own signatures state the expected ones, and
        `super()` calls upstream's. A flag overrides its opposite; annotated attributes are new.
    signature: `bare_signature(target)` in the supported version; "" for `set` and `subclass`.
    expected_repr: `repr(target)` without addresses, for `set`.
    why: one sentence on the fault or the missing feature without it.
    device: `cpu` seams are installed only where our CPU platform is active, `cuda` seams only where
        SGLang serves on an NVIDIA GPU.
    issue: public thread on the fault, or on the change that caused it: `sgl-project/sglang#N` or
        a URL; several with a comma; `none found (DATE)` after a search without result. Required in
        `upstream_fixes`, as is `drop_when`.
    drop_when: the change of upstream that makes the patch unnecessary.
    """

    name: str
    target: str
    kind: Kind
    hook: Any
    why: str
    signature: str = ""
    expected_repr: str = ""
    device: Literal["any", "cpu", "cuda"] = "any"
    issue: str = ""
    drop_when: str = ""


class Put(Protocol):
    """A decorator that adds a hook as a seam and returns the hook."""

    def __call__(self, hook: Hook) -> Hook: ...


class Seams(list[Seam]):
    """The seams of a module, in order; a decorator for each kind adds a hook.

    `@SEAMS.after("name", "path.of.target", why="...")`, with further fields of `Seam` by name. The
    signature is the hook's own without `original` or `result`, unless it is given.
    shared: fields that all seams of the module have.
    """

    def __init__(self, **shared: Any) -> None:
        self._shared = shared

    def _put(self, kind: Kind, name: str, target: str, **own: Any) -> Put:
        def put(hook: Hook) -> Hook:
            stated = {**self._shared, **own}
            if kind not in ("set", "subclass"):
                skipped = int(kind in ("after", "around"))
                stated.setdefault("signature", bare_signature(hook, skipped))
            self.append(Seam(name, target, kind, hook, **stated))
            return hook

        return put

    before = partialmethod[Put](_put, "before")
    after = partialmethod[Put](_put, "after")
    around = partialmethod[Put](_put, "around")
    replace = partialmethod[Put](_put, "replace")
    set = partialmethod[Put](_put, "set")
    subclass = partialmethod[Put](_put, "subclass")


def bare_signature(target: Any, skipped: int = 0) -> str:
    """Return `str(inspect.signature(target))` without annotations and object addresses.

    It begins with `async ` for a coroutine function, with `async for ` for an asynchronous
    generator or a function annotated to return `AsyncIterator`. Follows `__wrapped__`, so a target
    that another plugin hooked still shows its own signature. skipped: number of leading parameters
    to skip. Raises TypeError or ValueError when `target` has none.
    """
    stated = inspect.signature(target).parameters.values()
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in stated]
    bare = _ADDRESS.sub("", str(inspect.Signature(parameters[skipped:])))
    function = inspect.unwrap(target)
    if inspect.iscoroutinefunction(function):
        return f"async {bare}"
    returns = str(getattr(function, "__annotations__", {}).get("return", ""))
    loops = inspect.isasyncgenfunction(function) or returns.startswith("AsyncIterator")
    return f"async for {bare}" if loops else bare


def bare_repr(value: Any) -> str:
    """Return `repr(value)` without object addresses."""
    return _ADDRESS.sub("", repr(value))
