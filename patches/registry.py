"""Check, install and verify the seams: all signatures first, then all patches, then a proof.

SGLang's `HookRegistry` (sglang/srt/plugins/hook_registry.py) applies hooks but only logs
failures. Here a seam whose target is missing or has another signature raises `DSparkError`
before any change, and `verify` proves after `HookRegistry.apply_hooks` that each hook is
reachable from its target.

`HookRegistry` also rebinds module globals that hold the original by value (`from x import f`), if
their module is loaded by then; modules loaded later read the patched name. Not rebound are copies
in class bodies, default arguments, dictionaries and partials: a seam whose consumer keeps such a
copy must target the copy. Names that are None or constants cannot be wrapped: kind `set`.

Several seams of kind `subclass` on one class make one subclass of it. It keeps the class's name,
which SGLang compares, and becomes the base of classes already derived from the original.
"""

from __future__ import annotations

import inspect
import pkgutil
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seam, bare_repr, bare_signature
from sglang_dspark.serving import upstream
from sglang_dspark.serving.startup import WHAT_TO_DO

installed: list[Seam] = []  # in this process


@dataclass(frozen=True)
class Mismatch:
    """A difference from a seam's statement. place: its target, or the first method that differs."""

    seam: Seam
    place: str
    expected: str
    found: str

    def __str__(self) -> str:
        """Describe it in one line."""
        return (
            f"seam {self.seam.name}: {self.place} should be {self.expected} but is "
            f"{self.found}; {WHAT_TO_DO}"
        )


def mismatch(seam: Seam) -> Mismatch | None:
    """Compare the object at `seam.target` with the signatures that the seam states."""
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # importing the target's module runs foreign code
        found = f"nothing ({type(error).__name__}: {error})"
        return Mismatch(seam, seam.target, expectation(seam), found)
    for name, expected in stated_of(seam).items():
        found = _found(seam, target, name)
        if found != expected:
            return Mismatch(seam, f"{seam.target}.{name}".rstrip("."), expected, found)
    return None


def stated_of(seam: Seam) -> dict[str, str]:
    """Return a seam's statement: attribute of the target -> its signature or representation.

    The target itself is "". For `subclass` these are the methods and flags that the hook overrides.
    """
    if seam.kind != "subclass":
        return {"": seam.signature or seam.expected_repr}
    stated = {}
    for name, value in vars(seam.hook).items():
        is_special = name.startswith("__") and name != "__init__"
        if is_special or name in inspect.get_annotations(seam.hook):
            continue
        is_flag = isinstance(value, bool)
        stated[name] = repr(not value) if is_flag else bare_signature(getattr(seam.hook, name))
    return stated


def expectation(seam: Seam) -> str:
    """Describe a seam's expected target in one line."""
    return "; ".join(f"{name} {text}".lstrip() for name, text in stated_of(seam).items())


def _found(seam: Seam, target: Any, name: str) -> str:
    """Describe the target, or its attribute `name`, as `stated_of` does."""
    if name and not hasattr(target, name):
        return "nothing"
    there = getattr(target, name) if name else target
    if seam.expected_repr or not callable(there):
        return bare_repr(there)
    try:
        return bare_signature(there)
    except (TypeError, ValueError):
        return f"no signature: {bare_repr(there)}"


def install(seams: Sequence[Seam]) -> None:
    """Check these seams, then register or set all of them.

    Hooks become effective with the next `HookRegistry.apply_hooks()`; `set` seams at once.
    Raises DSparkError, before any change, naming the first target with another signature.
    """
    for seam in seams:
        if wrong := mismatch(seam):
            raise DSparkError(str(wrong))
    for target, hook, kind in _hooks(seams):
        if kind == "set":
            setattr(*_owner(target), hook)
        else:
            upstream.HookRegistry.register(target, hook, upstream.HookType(kind))
    installed.extend(seams)


def _hooks(seams: Sequence[Seam]) -> Iterator[tuple[str, Any, str]]:
    """Yield target, hook and kind for `HookRegistry`; merge the subclasses of one class."""
    overrides: dict[str, list[type]] = {}
    for seam in seams:
        if seam.kind == "subclass":
            overrides.setdefault(seam.target, []).insert(0, seam.hook)  # the last is outermost
        else:
            yield seam.target, seam.hook, seam.kind
    for target, hooks in overrides.items():
        base = pkgutil.resolve_name(target)
        derived, ours = base.__subclasses__(), derive(base, *hooks)
        for each in derived:
            each.__bases__ = tuple(ours if parent is base else parent for parent in each.__bases__)
        yield target, ours, "replace"


def derive(base: type, *hooks: type) -> type:
    """Make a class with the hooks' methods over those of `base`, under the name of `base`."""
    ours = types.new_class(base.__name__, (*hooks, base))
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(ours, name, getattr(base, name))
    return ours


def verify() -> None:
    """Raise `DSparkError` unless every installed seam's hook is reachable from its target."""
    for seam in installed:
        if not took(seam):
            raise DSparkError(
                f"seam {seam.name}: the {seam.kind} hook on {seam.target} did not take (another "
                f"plugin may have replaced it); remove that plugin, {WHAT_TO_DO}"
            )


def took(seam: Seam) -> bool:
    """Return whether the seam's hook is at its target, or in the chain of wrappers there."""
    current = inspect.getattr_static(*_owner(seam.target), None)
    if seam.kind == "subclass":
        return isinstance(current, type) and issubclass(current, seam.hook)
    return any(seam.hook is part for part in _wrapper_parts(current))


def _wrapper_parts(value: Any) -> Iterator[Any]:
    """Yield a value, and every hook and function in its `__wrapped__` chain, outermost first."""
    while value is not None:
        yield value
        if inspect.isfunction(value):
            yield from inspect.getclosurevars(value).nonlocals.values()
        value = getattr(value, "__wrapped__", None)


def _owner(target: str) -> tuple[Any, str]:
    """Return the object and the attribute's name of a dotted path."""
    path, _, attribute = target.rpartition(".")
    return pkgutil.resolve_name(path), attribute
