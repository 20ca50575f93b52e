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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seam, bare_repr, bare_signature
from sglang_dspark.serving import upstream
from sglang_dspark.serving.startup import WHAT_TO_DO

State = Literal["installed", "inert", "mismatch", "pending"]

_installed: list[Seam] = []


@dataclass(frozen=True)
class SeamCheck:
    """Compare a seam's target with the seam's expectation. ok: `found` is `expected`.

    place: the object compared: the target, or the first method of it that differs.
    """

    seam: Seam
    ok: bool
    expected: str
    found: str
    place: str


def check_seam(seam: Seam) -> SeamCheck:
    """Compare the object at `seam.target` with the signatures that the seam states."""
    stated = stated_of(seam)
    if not stated:
        expected = "a signature or expected_repr"
        return SeamCheck(seam, False, expected, "a seam that states neither", seam.target)
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # importing the target's module runs foreign code
        found = f"nothing ({type(error).__name__}: {error})"
        return SeamCheck(seam, False, expectation(seam), found, seam.target)
    if seam.kind == "subclass" and not isinstance(target, type):
        return SeamCheck(seam, False, "a class", bare_repr(target), seam.target)
    for name, expected in stated.items():
        found = _found(seam, target, name)
        if found != expected:
            place = f"{seam.target}.{name}" if name else seam.target
            return SeamCheck(seam, False, expected, found, place)
    return SeamCheck(seam, True, expectation(seam), expectation(seam), seam.target)


def stated_of(seam: Seam) -> dict[str, str]:
    """Return a seam's statement: attribute of the target -> its signature or representation.

    The target itself is "". For `subclass` these are the methods and flags that the hook overrides.
    """
    if seam.kind != "subclass":
        stated = seam.expected_repr if _is_value(seam, "") else seam.signature
        return {} if stated is None else {"": stated}
    own = inspect.get_annotations(seam.hook)
    return {
        name: repr(not value) if _is_value(seam, name) else bare_signature(getattr(seam.hook, name))
        for name, value in vars(seam.hook).items()
        if name not in own and (name == "__init__" or not name.startswith("__"))
    }


def expectation(seam: Seam) -> str:
    """Describe a seam's expected target in one line."""
    return "; ".join(f"{name} {text}".lstrip() for name, text in stated_of(seam).items())


def _is_value(seam: Seam, name: str) -> bool:
    """Return whether an attribute is compared by its representation instead of its signature."""
    return isinstance(vars(seam.hook).get(name), bool) if name else seam.signature is None


def _found(seam: Seam, target: Any, name: str) -> str:
    """Describe the target, or its attribute `name`, as `stated_of` does."""
    if name and not hasattr(target, name):
        return "nothing"
    there = getattr(target, name) if name else target
    if _is_value(seam, name):
        return bare_repr(there)
    try:
        return bare_signature(there)
    except (TypeError, ValueError):
        return f"no signature: {bare_repr(there)}"


def mismatch(check: SeamCheck) -> str:
    """Describe a failed check in one line: the target, its expected and its actual form."""
    return (
        f"seam {check.seam.name}: {check.place} should be {check.expected} but is "
        f"{check.found}; {WHAT_TO_DO}"
    )


def is_inert(seam: Seam, *, device: str) -> bool:
    """Return whether the seam is not installed in this process: it is for another device."""
    return seam.device not in ("any", device)


def install(seams: Iterable[Seam], *, device: str) -> None:
    """Check every seam for this device, then register or set all of them; once a process.

    Hooks become effective with the next `HookRegistry.apply_hooks()`; `set` seams at once.
    Raises DSparkError, before any change, naming the first target with another signature.
    """
    if not _installed:
        add(chosen_seams(seams, device=device))


def chosen_seams(seams: Iterable[Seam], *, device: str) -> list[Seam]:
    """Return the seams for this device. Raises DSparkError if two have one target."""
    chosen = [seam for seam in seams if not is_inert(seam, device=device)]
    _require_distinct(chosen)
    return chosen


def add(seams: Sequence[Seam]) -> None:
    """Check these seams, then register or set all of them. Raises DSparkError as `install` does."""
    for seam in seams:
        check = check_seam(seam)
        if not check.ok:
            raise DSparkError(mismatch(check))
    for target, hook, kind in _hooks(seams):
        if kind == "set":
            owner, attribute = _owner(target)
            setattr(owner, attribute, hook)
        else:
            upstream.HookRegistry.register(target, hook, upstream.HookType(kind))
    _installed.extend(seams)


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
    for seam in _installed:
        if not took(seam):
            raise DSparkError(
                f"seam {seam.name}: the {seam.kind} hook on {seam.target} did not take (another "
                f"plugin may have replaced it); remove that plugin, {WHAT_TO_DO}"
            )


def took(seam: Seam) -> bool:
    """Return whether the seam's hook is at its target, or in the chain of wrappers there."""
    owner, attribute = _owner(seam.target)
    current = getattr(owner, attribute, None)
    if isinstance(owner, type):
        current = inspect.getattr_static(owner, attribute, None)
    if seam.kind == "subclass":
        return isinstance(current, type) and issubclass(current, seam.hook)
    if seam.kind == "set" or isinstance(seam.hook, type):
        return current is seam.hook
    return any(seam.hook is part for part in _wrapper_parts(current))


def state_of(seam: Seam, *, device: str) -> State:
    """Return the seam's state in this process; `pending`: checked but not installed here."""
    if is_inert(seam, device=device):
        return "inert"
    if seam in _installed:
        return "installed" if took(seam) else "mismatch"
    return "pending" if check_seam(seam).ok else "mismatch"


def installed() -> tuple[Seam, ...]:
    """Return the seams that `install` installed in this process."""
    return tuple(_installed)


def _wrapper_parts(value: Any) -> Iterator[Any]:
    """Yield every hook and function in a `functools.wraps` chain, outermost first."""
    while value is not None:
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
            continue
        yield value
        try:
            yield from inspect.getclosurevars(value).nonlocals.values()
        except TypeError:
            return  # not a Python function: it wraps no hook of ours
        value = getattr(value, "__wrapped__", None)


def _owner(target: str) -> tuple[Any, str]:
    """Return the object and the attribute's name of a dotted path."""
    path, _, attribute = target.rpartition(".")
    return pkgutil.resolve_name(path), attribute


def _require_distinct(seams: list[Seam]) -> None:
    """Raise DSparkError for two seams with one target: one would silently undo the other."""
    seen: dict[str, str] = {}
    for seam in seams:
        if seam.kind not in ("replace", "set"):
            continue
        if seam.target in seen:
            raise DSparkError(
                f"seams {seen[seam.target]} and {seam.name} both replace {seam.target}; "
                "report this, and set DSPARK_DISABLE=1 meanwhile"
            )
        seen[seam.target] = seam.name
