"""A small upstream of its own, so that each kind of seam and each way to fail can be shown."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from sglang_dspark.patches import registry

SOURCE = """
NOTHING = None
LIMIT = 3

def add(a: int, b: int = 1) -> int:
    return a + b

def twice(a):
    return 2 * a

class Worker:
    def step(self, n: int) -> int:
        return n + 10

    @staticmethod
    def name(prefix="w"):
        return prefix + "orker"

    @classmethod
    def make(cls, n=0):
        return (cls.__name__, n)

class Packed(Worker):
    fast = False

    def pack(self, n):
        return self.step(n)
"""
CONSUMER = """
from toy_upstream import add

TABLE = {"add": add}

def call(a):
    return add(a)
"""


@pytest.fixture
def upstream() -> Iterator[types.ModuleType]:
    """Module `toy_upstream` and its by-value consumer `toy_consumer`, with empty registries."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert not registry.installed
    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    HookRegistry.reset()
    for name, source in (("toy_upstream", SOURCE), ("toy_consumer", CONSUMER)):
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(source, module.__dict__)
    yield sys.modules["toy_upstream"]
    for name in ("toy_upstream", "toy_consumer"):
        del sys.modules[name]
    registry.installed.clear()
    HookRegistry.reset()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.update(patched)
