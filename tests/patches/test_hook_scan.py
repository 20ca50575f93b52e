"""Names that hold a hooked object are rebound as by SGLang's own walk, by one for all hooks."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.plugins import hook_registry

from sglang_dspark.patches import all_seams
from sglang_dspark.patches.upstream_fixes import hook_scan

Propagate = Callable[[Any, Any, Any], int]


def theirs() -> Propagate:
    """SGLang's own function, also where the patch is installed in this process."""
    found = hook_registry._propagate_patch
    assert found is not hook_scan.propagate, "tests run without plugins"
    return found  # type: ignore[no-any-return]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes modules of these names and values."""

    def made(name: str, **values: Any) -> ModuleType:
        module = ModuleType(f"hook_scan_{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    hook_scan.forget()
    yield made
    hook_scan.forget()


def function() -> Callable[[], None]:
    """One that no module holds by value, this one included."""
    return lambda: None


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "SGLang's"])
def test_all_names_but_the_source_are_rebound(
    modules: Callable[..., ModuleType], ours: bool
) -> None:
    propagate = hook_scan.propagate if ours else theirs()

    one, two, first, second = (function() for _ in range(4))
    three, third = type("Three", (), {}), type("Third", (), {})
    source = modules("source", f=one)
    taken = modules("taken", f=one, g=one, other=two, C=three, text="f", number=3)
    assert propagate(one, first, source) == 2
    assert (source.f, taken.f, taken.g, taken.other) == (one, first, first, two)
    later = modules("later", f=one, g=two)  # imported by a later hook's target
    assert propagate(two, second, source) == 2
    assert (later.f, later.g, taken.other) == (one, second, second)
    assert propagate(three, third, source) == 1
    assert taken.C is third
    # A hook on what a hook has put there.
    assert propagate(first, second, source) == 2
    assert (taken.f, taken.g) == (second, second)
    assert propagate(third, three, source) == 1
    assert (taken.C, taken.text, taken.number) == (three, "f", 3)


def test_a_name_that_has_changed_since_is_left_alone(
    modules: Callable[..., ModuleType],
) -> None:
    one, two, three = (function() for _ in range(3))
    source, taken = modules("source"), modules("taken", f=one, g=one)
    hook_scan.propagate(two, three, source)
    taken.f = 5
    assert hook_scan.propagate(one, three, source) == 1
    assert (taken.f, taken.g) == (5, three)


def test_what_was_noted_is_dropped_when_all_hooks_are_applied(
    modules: Callable[..., ModuleType],
) -> None:
    one, two = function(), function()
    source, taken = modules("source"), modules("taken")
    hook_scan.propagate(one, two, source)
    taken.f = one
    assert hook_scan.propagate(one, two, source) == 0, "modules are not walked again"
    hook_scan.forget()
    assert hook_scan.propagate(one, two, source) == 1
    assert taken.f is two


def left_out() -> Iterator[tuple[ModuleType, str, Any]]:
    """Names and values of modules that are not walked."""
    for module in list(sys.modules.values()):
        root = getattr(module, "__name__", "").partition(".")[0]
        if root in hook_scan._OTHERS and isinstance(module, ModuleType):
            yield from ((module, name, value) for name, value in list(vars(module).items()))


def test_skipped_modules_hold_no_target_by_value() -> None:
    """But the few that are hooked there, each where it is defined alone."""
    targets = {each.target for each in all_seams() if each.kind != "set"}
    hooked = {id(pkgutil.resolve_name(target)): target for target in targets}
    held = {f"{module.__name__}.{name}" for module, name, v in left_out() if id(v) in hooked}
    assert held == {each for each in targets if each.partition(".")[0] in hook_scan._OTHERS}
