"""torch's compiler is imported by its first use, and then all is as after an ordinary import."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys

import pytest
import torch

from sglang_dspark.serving.late_compiler import late_compiler

START = """
import sys, torch
from sglang_dspark.serving.late_compiler import late_compiler
calls = []
with late_compiler():
    import torch._dynamo as compiler
    @torch._dynamo.disable
    def plain(x): return calls.append("plain") or x + 1
    @torch._dynamo.disable(reason="none")
    def named(x): return calls.append("named") or x + 2
    @torch.compiler.disable(recursive=False)
    def deep(x): return x + 3
    @torch._dynamo.allow_in_graph
    def allowed(x): return 2 * x
    @torch._dynamo.assume_constant_result
    def constant(): return 7
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x): return 9 * x
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
def ran(): return "torch._dynamo.eval_frame" in sys.modules
assert not ran() and not calls
"""
AS_EVER = """
assert ran()
assert torch._dynamo is compiler is sys.modules["torch._dynamo"]
assert type(compiler) is type(sys) and repr(compiler).startswith("<module 'torch._dynamo' from")
assert (plain(1), named(1), deep(1), allowed(3), constant()) == (2, 3, 4, 6, 7)
assert calls == ["plain", "named"] and plain.__name__ == "plain"
assert compiled(torch.ones(2)).tolist() == [9.0, 9.0]
part = torch._dynamo._trace_wrapped_higher_order_op
assert part.TransformGetItemToIndex is TransformGetItemToIndex
assert torch._dynamo.disable(plain) is not plain and torch._dynamo.is_compiling() is False
parts = {n: m for n, m in sys.modules.items() if n.startswith("torch._dynamo.")}
assert all(m.__spec__.name == n and m.__spec__.loader is m.__loader__ for n, m in parts.items())
assert parts["torch._dynamo.convert_frame"].config is torch._dynamo.config
assert torch._dynamo.backends.registry is parts["torch._dynamo.backends.registry"]
"""
USES = {
    "a decorated function is called": "assert plain(1) == 2; calls.clear()",
    "one decorated with options": "assert named(1) == 3; calls.clear()",
    "something else is taken": "torch._dynamo.reset()",
    "something is imported from it": "from torch._dynamo import reset",
    "a part of it is imported": "import torch._dynamo.config",
    "a part that registers itself": "from torch._dynamo.decorators import mark_static",
    "something is imported from a part": "from torch._dynamo.backends.common import aot_autograd",
    "a class is decorated": "torch._dynamo.disable(type('C', (), {'__call__': id})())",
    "torch decorates for itself": "torch.nn.Embedding(4, 2, device='meta')",
    "a function is compiled": "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_compiler_is_imported_by_its_first_use(use: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", START + use + AS_EVER], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_import_that_fails_fails_again() -> None:
    """Refuse to take for the compiler a module that is half done."""
    attempts = """
import importlib
sys.modules["sympy"] = None
for attempt in (lambda: torch._dynamo.reset(), lambda: importlib.import_module("torch._dynamo")):
    try:
        attempt()
    except ImportError as error:
        assert "sympy" in str(error), error
    else:
        raise AssertionError("it was imported without SymPy")
"""
    ended = subprocess.run(
        [sys.executable, "-c", START + attempts], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_decorators_are_put_back() -> None:
    importlib.import_module("torch._dynamo")  # which another test may expect as it is
    before = (torch.compile, torch.compiler.disable, torch.compiler.allow_in_graph)
    with contextlib.suppress(ValueError), late_compiler():
        assert torch.compile is not before[0]
        raise ValueError
    assert before == (torch.compile, torch.compiler.disable, torch.compiler.allow_in_graph)


def test_a_function_given_by_name_is_decorated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")
    seen = []
    monkeypatch.setattr(torch.compiler, "disable", lambda fn=None, **options: seen.append(options))
    with late_compiler():
        torch.compiler.disable(fn=print, reason="none")
    assert seen == [{"reason": "none"}]
