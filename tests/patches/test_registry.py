"""The registry: every kind of seam takes, every mismatch is named, nothing is half installed."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dspark.errors import DSparkError
from sglang_dspark.patches import registry
from sglang_dspark.patches.seam import Seam, Upstream, bare_signature
from sglang_dspark.serving import startup


def seam(target: str, kind: Any, hook: Any, signature: str | None = None, **extra: Any) -> Seam:
    return Seam(f"toy-{target}", f"toy_upstream.{target}", kind, hook, "test", signature, **extra)


def put(*seams: Seam) -> None:
    registry.install(seams)
    HookRegistry.apply_hooks()
    registry.verify()


def test_every_kind_takes(upstream: types.ModuleType) -> None:
    put(
        seam("add", "around", lambda original, a, b=1: -original(a, b), "(a, b=1)"),
        seam("twice", "replace", lambda a: 3 * a, "(a)"),
        seam("Worker.step", "after", lambda result, self, n: result * 100, "(self, n)"),
        seam("Worker.name", "before", lambda prefix="w": (("W",), {}), "(prefix='w')"),
        seam("Worker.make", "after", lambda result, cls, n=0: (*result, "hooked"), "(n=0)"),
        seam("NOTHING", "set", len, expected_repr="None"),
        seam("LIMIT", "set", 7, expected_repr="3"),
    )
    worker = upstream.Worker
    assert upstream.add(2) == -3
    assert upstream.twice(2) == 6
    assert worker().step(1) == 1100
    assert worker.name() == "Worker"
    assert worker.make(4) == ("Worker", 4, "hooked")
    assert upstream.NOTHING is len
    assert upstream.LIMIT == 7
    assert len(registry.installed) == 7


def test_class_replacement(upstream: types.ModuleType) -> None:
    class Other(upstream.Worker):  # type: ignore[name-defined, misc]
        pass

    put(seam("Worker", "replace", Other, "()"))
    assert upstream.Worker is Other


class Doubled(Upstream):
    """Overrides of `toy_upstream.Worker`."""

    doubled: int = 0  # new

    def step(self, n: int) -> int:
        self.doubled += 1
        return 2 * super().step(n)


class Louder(Upstream):
    """Another seam's overrides of the same class, put over the first ones."""

    def step(self, n: int) -> int:
        return super().step(n) + 1

    @staticmethod
    def name(prefix: str = "w") -> str:
        return prefix.upper() + "ORKER"


def test_subclasses_of_one_class_become_one(upstream: types.ModuleType) -> None:
    original, derived = upstream.Worker, upstream.Packed()
    first, second = (seam("Worker", "subclass", hook) for hook in (Doubled, Louder))
    put(first, second)
    worker = upstream.Worker()
    assert worker.step(1) == 2 * 11 + 1
    assert worker.doubled == 1
    assert worker.name() == "WORKER"
    assert upstream.Worker.__name__ == original.__name__ == "Worker"
    assert isinstance(worker, original)
    assert registry.took(first)
    upstream.Worker = type("Rival", (original,), {})
    assert not registry.took(second)
    assert derived.pack(1) == 2 * 11 + 1  # a class that was derived before


def test_a_hook_on_a_method_of_a_subclass_takes(upstream: types.ModuleType) -> None:
    put(
        seam("Worker.step", "after", lambda result, self, n: -result, "(self, n)"),
        seam("Worker", "subclass", Doubled),
    )
    assert upstream.Worker().step(1) == -22


class Fast(Upstream):
    """A flag that upstream has as False."""

    fast = True


class Slow(Upstream):
    """A flag as upstream has it."""

    fast = False


class Faster(Upstream):
    """A flag that upstream has not."""

    faster = True


class Gone(Upstream):
    """A method that upstream has not."""

    def leap(self, n: int) -> int:
        return n


class Renamed(Upstream):
    """A method whose argument upstream calls otherwise."""

    def pack(self, count: int) -> int:
        return count


class Bound(Upstream):
    """A method that is static upstream."""

    def name(self, prefix: str = "w") -> str:
        return prefix


def test_a_flag_overrides_its_opposite(upstream: types.ModuleType) -> None:
    fast = seam("Packed", "subclass", Fast)
    assert registry.expectation(fast) == "fast False"
    put(fast)
    assert upstream.Packed().fast


@pytest.mark.parametrize(
    ("target", "hook", "says"),
    [
        ("Packed", Slow, "toy_upstream.Packed.fast should be True but is False"),
        ("Packed", Faster, "toy_upstream.Packed.faster should be False but is nothing"),
        ("Packed", Gone, "toy_upstream.Packed.leap should be (self, n) but is nothing"),
        ("Packed", Renamed, "toy_upstream.Packed.pack should be (self, count) but is (self, n)"),
        ("Packed", Bound, "Packed.name should be (self, prefix='w') but is (prefix='w')"),
        ("add", Gone, "toy_upstream.add.leap should be (self, n) but is nothing"),
        ("Missing", Gone, "toy_upstream.Missing should be leap (self, n) but is nothing (Attr"),
    ],
)
def test_an_override_of_another_signature_is_named(
    upstream: types.ModuleType, target: str, hook: type, says: str
) -> None:
    with pytest.raises(DSparkError) as raised:
        registry.install([seam(target, "subclass", hook)])
    assert says in str(raised.value)
    assert not HookRegistry._hooks


def test_by_value_importers_follow_but_copies_in_containers_do_not(
    upstream: types.ModuleType,
) -> None:
    put(seam("add", "replace", lambda a, b=1: "hooked", "(a, b=1)"))
    consumer = sys.modules["toy_consumer"]
    assert consumer.call(1) == "hooked"
    assert consumer.TABLE["add"](1) == 2  # the reason why such a copy needs a seam of its own


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (seam("add", "after", print, "(a, b)"), "but is (a, b=1)"),
        (seam("gone", "after", print, "(a)"), "but is nothing (AttributeError"),
        (seam("NOTHING", "replace", print, "(a)"), "but is None"),
        (seam("LIMIT", "set", 1, expected_repr="4"), "should be 4 but is 3"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_touched(
    upstream: types.ModuleType, wrong: Seam, found: str
) -> None:
    good = [
        seam("twice", "replace", lambda a: 0, "(a)"),
        seam("Worker", "set", 5, expected_repr="<class 'toy_upstream.Worker'>"),
    ]
    worker = upstream.Worker
    worker.__module__ = "toy_upstream"
    with pytest.raises(DSparkError) as raised:
        registry.install([*good, wrong])
    text = str(raised.value)
    assert wrong.target in text
    assert found in text
    assert "install sglang==0.5.23 or set DSPARK_DISABLE=1" in text
    assert upstream.Worker is worker
    HookRegistry.apply_hooks()
    assert upstream.twice(2) == 4
    assert not registry.installed


def test_a_hook_that_did_not_take_is_found(upstream: types.ModuleType) -> None:
    mine = seam("twice", "after", lambda result, a: result, "(a)")
    registry.install([mine])
    with pytest.raises(DSparkError, match=r"hook on toy_upstream\.twice did not take"):
        registry.verify()  # apply_hooks has not run
    HookRegistry.apply_hooks()
    registry.verify()
    upstream.twice = lambda a: a  # a rival that assigns instead of hooking
    assert not registry.took(mine)
    with pytest.raises(DSparkError, match="did not take"):
        registry.verify()


def test_a_set_value_that_was_overwritten_is_found(upstream: types.ModuleType) -> None:
    put(seam("NOTHING", "set", len, expected_repr="None"))
    upstream.NOTHING = max
    with pytest.raises(DSparkError, match="did not take"):
        registry.verify()


def test_hooks_of_other_plugins_may_stand_above_and_below(upstream: types.ModuleType) -> None:
    HookRegistry.register("toy_upstream.twice", lambda result, a: result + 1, HookType.AFTER)
    registry.install([seam("twice", "around", lambda f, a: f(a) * 10, "(a)")])
    HookRegistry.register("toy_upstream.twice", lambda result, a: result + 3, HookType.AFTER)
    HookRegistry.apply_hooks()
    registry.verify()
    assert upstream.twice(1) == 33


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23rc1", "1.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(DSparkError, match=r"only 0\.5\.23.*install sglang==0\.5\.23 or set"):
        startup.check_version(version)


def test_the_supported_version_passes() -> None:
    startup.check_version("0.5.23")


def test_signatures_carry_no_annotations_and_no_addresses() -> None:
    marker = object()

    def f(a: int, *rest: str, b: object = marker, c: float = 0.5) -> None:
        """Only the signature matters."""

    assert bare_signature(f) == "(a, *rest, b=<object object>, c=0.5)"


def test_signatures_say_how_a_result_is_awaited() -> None:
    """One that returns an asynchronous iterator may take the place of a generator."""

    async def waits(a: int) -> int:
        return a

    async def loops(a: int) -> AsyncIterator[int]:
        yield a

    def returns(a: int) -> AsyncIterator[int]:
        return loops(a)

    @functools.wraps(waits)
    def hooked(*given: int) -> object:
        return waits(*given)

    assert bare_signature(waits) == bare_signature(hooked) == "async (a)"
    assert bare_signature(loops) == bare_signature(returns) == "async for (a)"
