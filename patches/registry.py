"""Check, install and verify the seams: all signatures first, then all patches, then a proof.

SGLang's `HookRegistry` (sglang/srt/plugins/hook_registry.py) applies hooks but only logs
what fails. Here a seam whose target is missing or has another signature raises `DSparkError`
before anything is touched, and `verify` proves after `HookRegistry.apply_hooks` that each hook is
reachable from its target.

`HookRegistry` also rebinds module globals that hold the original by value (`from x import f`), if
their module is loaded by then; modules loaded later read the patched name. Not rebound are copies
in class bodies, default arguments, dictionaries and partials: a seam whose consumer keeps such a
copy must target the copy. Names that are None or constants cannot be wrapped: kind `set`.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream
from sglang_dspark.serving.startup import WHAT_TO_DO

State = Literal["installed", "inert", "mismatch", "pending"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_installed: list[Seam] = []


@dataclass(frozen=True)
class SeamCheck:
    """Compare a seam's target with what the seam expects. ok: `found` is `expected`."""

    seam: Seam
    ok: bool
    expected: str
    found: str


def bare_signature(target: Any) -> str:
    """Return `str(inspect.signature(target))` without annotations and object addresses.

    Follows `__wrapped__`, so a target that another plugin hooked still shows its own signature.
    Raises TypeError or ValueError when `target` has none.
    """
    signature = inspect.signature(target)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return _ADDRESS.sub("", str(bare))


def bare_repr(value: Any) -> str:
    """Return `repr(value)` without object addresses."""
    return _ADDRESS.sub("", repr(value))


def check_seam(seam: Seam) -> SeamCheck:
    """Compare the object at `seam.target` with the seam's signature or representation."""
    expected = seam.signature if seam.signature is not None else seam.expected_repr
    if expected is None:
        return SeamCheck(seam, False, "a signature or expected_repr", "a seam that states neither")
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # importing the target's module runs code that is not ours
        return SeamCheck(seam, False, expected, f"nothing ({type(error).__name__}: {error})")
    if seam.signature is None:
        found = bare_repr(target)
        return SeamCheck(seam, found == expected, expected, found)
    try:
        found = bare_signature(target)
    except (TypeError, ValueError):
        return SeamCheck(seam, False, expected, f"no signature: {bare_repr(target)}")
    return SeamCheck(seam, found == expected, expected, found)


def mismatch(check: SeamCheck) -> str:
    """Describe a failed check in one line: the target, what is expected there, what was found."""
    return (
        f"seam {check.seam.name}: {check.seam.target} should be {check.expected} but is "
        f"{check.found}; {WHAT_TO_DO}"
    )


def is_inert(seam: Seam, *, device: str) -> bool:
    """Return whether the seam stays out of this process: it is for another device."""
    return seam.device not in ("any", device)


def install(seams: Iterable[Seam], *, device: str) -> None:
    """Check every seam for this device, then register or set all of them; once a process.

    Hooks become effective with the next `HookRegistry.apply_hooks()`; `set` seams at once.
    Raises `DSparkError` naming the first target that is not what we expect; nothing is touched.
    """
    if _installed:
        return
    chosen = [seam for seam in seams if not is_inert(seam, device=device)]
    _require_distinct(chosen)
    for seam in chosen:
        check = check_seam(seam)
        if not check.ok:
            raise DSparkError(mismatch(check))
    for seam in chosen:
        if seam.kind == "set":
            owner, attribute = _owner(seam.target)
            setattr(owner, attribute, seam.hook)
        else:
            upstream.HookRegistry.register(seam.target, seam.hook, upstream.HookType(seam.kind))
    _installed.extend(chosen)


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
    if seam.kind == "set" or isinstance(seam.hook, type):
        return current is seam.hook
    return any(seam.hook is part for part in _wrapper_parts(current))


def state_of(seam: Seam, *, device: str) -> State:
    """Return the state in this process; `pending`: checked but not installed here."""
    if is_inert(seam, device=device):
        return "inert"
    if seam in _installed:
        return "installed" if took(seam) else "mismatch"
    return "pending" if check_seam(seam).ok else "mismatch"


def installed() -> tuple[Seam, ...]:
    """Return the seams that `install` put in place in this process."""
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
            return  # not a Python function: nothing of ours can be wrapped below
        value = getattr(value, "__wrapped__", None)


def _owner(target: str) -> tuple[Any, str]:
    """Return the object that has the attribute of the dotted path, and the attribute's name."""
    path, _, attribute = target.rpartition(".")
    return pkgutil.resolve_name(path), attribute


def _require_distinct(seams: list[Seam]) -> None:
    """Refuse two seams that replace or set one target: one would silently undo the other."""
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
