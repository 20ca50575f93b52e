"""Check the tables of what we use of SGLang: complete, without leftovers, true of the install."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.backends.cpu import fast_paths
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import upstream, upstream_calls, upstream_check
from sglang_dspark.serving.upstream_uses import ATTRIBUTES, REIMPLEMENTED

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sglang_dspark", "patches", "loadtest", "kernels")
IMPORTERS = {"sglang_dspark/plugin.py": "reads SGLang's version before any other name"}
NEEDS_A_PACKAGE = {"sglang.srt.layers.quantization.humming_utils"}  # humming-kernels
ADAPTERS = ("sglang_dspark/serving", "sglang_dspark/step", "sglang_dspark/backends", "patches")
TABLES = "sglang_dspark/serving/upstream_"
FOREIGN = {  # private names of torch, Python and xgrammar that the step uses
    "_buffers", "_constants", "_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters",
    "_parser", "_profiler_enabled", "_replace", "_sleep", "_value_",
}  # fmt: skip


@cache
def sources() -> dict[str, ast.Module]:
    """Path below the root and syntax of every file of ours, once each."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text(encoding="utf-8")) for f in files}


def is_sglang(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(each.name.split(".")[0] == "sglang" for each in node.names)
    from_it = isinstance(node, ast.ImportFrom) and not node.level
    return from_it and str(node.module).split(".")[0] == "sglang"  # type: ignore[attr-defined]


def test_one_module_knows_where_the_names_of_sglang_are() -> None:
    found = {path for path, tree in sources().items() if any(map(is_sglang, ast.walk(tree)))}
    assert found == set(IMPORTERS)


def imports_upstream(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "sglang_dspark.serving"
        and any(each.name == "upstream" for each in node.names)
        for node in tree.body
    )


def test_every_name_that_is_used_is_listed_and_every_listed_one_is_used() -> None:
    used = {
        node.attr
        for tree in filter(imports_upstream, sources().values())
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "upstream"
    }
    listed = set(upstream.PLACES) | set(upstream.MODULES)
    helpers = {"MODULES", "NAMES", "PLACES", "other_class"}
    assert used - helpers == listed


def is_hook(node: ast.stmt) -> bool:
    """A function, or a class that a seam puts over one of upstream's."""
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) == "Upstream" for base in node.bases)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def private_names(tree: ast.Module) -> set[str]:
    """Private attributes of objects other than `self` of our classes and our own modules.

    `self` in a subclass of upstream's is not ours; the seam checks what its `super()` calls.
    """
    hooks = {id(node) for part in tree.body if is_hook(part) for node in ast.walk(part)}

    def is_ours(node: ast.Attribute) -> bool:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super":
            return True
        return owner in ("cls", "upstream") or (owner == "self" and id(node) not in hooks)

    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {n.attr for n in attributes if re.match("_[a-z]", n.attr) and not is_ours(n)}


def test_every_private_attribute_that_is_used_is_listed() -> None:
    used, texts = set(), set()
    for path, tree in sources().items():
        if path.startswith(ADAPTERS) and not path.startswith(TABLES):
            used |= private_names(tree)
            texts |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    classes = [each for module in ATTRIBUTES.values() for each in module.values()]
    listed = {name for names in classes for name in names}
    assert used - FOREIGN - listed == set()
    private = {name for name in listed if name.startswith("_")}
    assert private <= used | texts, "listed but used nowhere"


def test_the_installed_sglang_has_all_of_it() -> None:
    """Read as text where it is not loaded, asked where it is."""
    assert upstream_check.missing() == []
    assert upstream_check.changed_bodies() == []
    assert upstream_calls.mismatches() == []


CALLED = """
import enum
from dataclasses import dataclass

class Base:
    def __init__(self, kind): ...

@dataclass
class Window(Base):
    ids: list
    cap: int = 0

class Kind(enum.Enum):
    FULL = 1

class Settings:
    EARLY = True

settings = Settings()

class Rule:
    @classmethod
    def made(cls, rows, *, seed): ...

def plan(batch, limit=1, *, width, depth=2): ...
def anything(batch, **options): ...
"""


@pytest.mark.parametrize(
    ("use", "lines"),
    [
        ("plan(b, width=1)", []),
        ("plan(b, 2, width=1, depth=3)", []),
        ("plan(*given, width=1)", []),
        ("plan(b, **named)", []),
        ("plan(b, wide=1, width=1)", ["m.plan has no argument wide any more"]),
        ("plan(b)", ["m.plan requires the argument width, which our call does not give"]),
        ("plan(width=1)", ["m.plan requires the argument batch, which our call does not give"]),
        ("anything(b, wide=1)", []),
        ("Window(ids=[])", []),
        ("Window([], cap=1)", []),
        ("Window(cap=1)", ["m.Window requires the argument ids, which our call does not give"]),
        ("Window(ids=[], kind=1)", ["m.Window has no argument kind any more"]),
        ("Base(kind=1)", []),
        ("Base(sort=1, kind=1)", ["m.Base has no argument sort any more"]),
        ("Rule.made(1, seed=2)", []),
        ("Rule.made(1)", ["m.Rule.made requires the argument seed, which our call does not give"]),
        ("Rule.making(1)", ["m.Rule has no making any more"]),
        ("Kind.FULL", []),
        ("Kind.WHOLE", ["m.Kind has no WHOLE any more"]),
        ("settings.EARLY.get()", []),
        ("settings.LATE.get()", ["m.settings has no LATE any more"]),
    ],
)
def test_calls_are_compared_with_definitions(
    monkeypatch: pytest.MonkeyPatch, use: str, lines: list[str]
) -> None:
    name = re.match(r"\w+", use).group()  # type: ignore[union-attr]
    monkeypatch.setattr(upstream_calls, "_definition", upstream_calls._definition.__wrapped__)
    monkeypatch.setattr(upstream_calls, "syntax", lambda module: ast.parse(CALLED))
    monkeypatch.setattr(upstream, "PLACES", {name: ("m", name)})
    monkeypatch.setattr(upstream_calls, "adapter_files", lambda: [("step/x.py", f"upstream.{use}")])
    assert upstream_calls.mismatches() == [f"{line} (used by step/x.py)" for line in lines]


def test_text_and_imports_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, _) in upstream.PLACES.items():
        if module not in NEEDS_A_PACKAGE:
            assert getattr(upstream, name) is not None or name.isupper()
    assert upstream_check.missing() == []
    names = {name: names for name, names in upstream.NAMES.items() if name not in NEEDS_A_PACKAGE}
    monkeypatch.setattr(upstream, "NAMES", {each: ("no_such_name",) for each in names})
    assert len(upstream_check.missing()) == len(names), "loaded modules are asked"
    with monkeypatch.context() as patch:
        for module in names:
            patch.delitem(sys.modules, module)
        assert len(upstream_check.missing()) == len(names), "others are read"


def test_a_name_is_looked_up_anew_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook or a test that rebinds a function of SGLang is seen, before and after a first use."""
    assert (
        upstream.get_parallel is importlib.import_module("sglang.srt.runtime_context").get_parallel
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", "another")
    assert upstream.get_parallel == "another"


def test_a_name_that_is_gone_says_so() -> None:
    with pytest.raises(AttributeError, match="upstream has no Typo"):
        upstream.Typo  # noqa: B018


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            ("NAMES", {"sglang.srt.environ": ("enws",)}),
            "SGLang has no sglang.srt.environ.enws any more",
        ),
        (
            ("NAMES", {"sglang.srt.gone": ("RMSNorm",)}),
            "SGLang has no module sglang.srt.gone any more",
        ),
        (("MODULES", {"x": "sglang.srt.gone"}), "SGLang has no module sglang.srt.gone any more"),
    ],
)
def test_a_start_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, table: tuple[str, Any], line: str
) -> None:
    monkeypatch.setattr(upstream, *table)
    with pytest.raises(DSparkError) as raised:
        upstream_check.require_all()
    assert str(raised.value).startswith(line)
    assert "install sglang==" in str(raised.value)


def test_a_missing_name_names_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", None)
    monkeypatch.delattr("sglang.srt.runtime_context.get_spec")
    (line,) = upstream_check.missing()
    assert line == (
        "SGLang has no sglang.srt.runtime_context.get_spec any more "
        "(used by backends/cpu/accept.py, patches/cpu/mtp.py, patches/step/chain_drafters.py, "
        "patches/step/drafted_counts.py, "
        "patches/upstream_fixes/request_limits.py)"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class A:\n    def f(self):\n        self.x = 1\n", True),
        ("class A:\n    x: int\n", True),
        ("class A:\n    def x(self): ...\n", True),
        ("class A:\n    def f(self):\n        self.x: int = 1\n", True),
        ("class A:\n    def f(self):\n        return self.x == 1\n", False),
        ("class A:\n    pass\n\n\nclass B:\n    x = 1\n", False),
    ],
)
def test_attributes_are_found_in_their_class(
    monkeypatch: pytest.MonkeyPatch, text: str, found: bool
) -> None:
    monkeypatch.setattr(upstream_check, "_text", lambda module: text)
    monkeypatch.setattr(upstream_check, "ATTRIBUTES", {"sglang.m": {"A": ("x",)}})
    monkeypatch.setattr(upstream, "NAMES", {})
    monkeypatch.setattr(upstream, "MODULES", {})
    said = [line.partition(" any more")[0] for line in upstream_check.missing()]
    assert said == ([] if found else ["sglang.m.A has no x"])


def test_only_a_changed_body_changes_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str) -> str | None:
        monkeypatch.setattr(upstream_check, "_text", lambda module: text)
        return upstream_check.body_hash("sglang.m", "A.f")

    first = digest("class A:\n    def f(self, a):\n        return a + 1\n")
    body = '        """Doc."""\n        # why\n        return (a + 1)\n'
    same = f"class A:\n    y = 2\n\n    def f(self, a):\n{body}"
    assert digest(same) == first
    for other in ("return a + 2", "return a - 1", "return b + 1", "return a + 1, None"):
        assert digest(f"class A:\n    def f(self, a):\n        {other}\n") not in (first, None)
    assert digest("class A:\n    def g(self, a):\n        return a + 1\n") is None


def test_who_re_implements_a_body_is_one_of_our_files() -> None:
    for functions in REIMPLEMENTED.values():
        for _, ours in functions.values():
            assert (ROOT / "sglang_dspark" / ours).is_file(), ours


def test_another_class_is_logged_once_with_what_was_expected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_paths, "_logged", set())
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert not fast_paths.supported(
            "a path", lambda: fast_paths.require_class("its size", 1.5, int, str)
        )
        assert fast_paths.supported(
            "a path", lambda: fast_paths.require_class("its size", 1, int, str)
        )
    assert caplog.messages == [
        "sglang-dspark: off: a path: its size is builtins.float, not int or str"
    ]
    assert upstream.other_class("it", True, int) == "it is builtins.bool, not int"  # a subclass
