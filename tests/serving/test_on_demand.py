"""Imports of an examination: reports of watched modules, and functions compiled by their call."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_dspark.serving import on_demand

FILES = {
    "watched_inner": "VALUE = 1\n",
    "watched_outer": "from watched_inner import VALUE\nMORE = VALUE + 1\n",
    "watched_broken": "import watched_inner\nraise ImportError('never')\n",
    "watched_other": "",
}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave finders and torch's compiler to the tests behind these as they are."""
    importlib.import_module("torch._dynamo")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Reports of the modules of `FILES`, each with the names in it."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    reports: list[list[str]] = []
    on_demand.report_imports(FILES.keys() - {"watched_other"}, reports.append)
    yield reports
    for name in FILES:
        sys.modules.pop(name, None)


def test_modules_are_reported_after_the_outermost_import(watched: list[list[str]]) -> None:
    outer = importlib.import_module("watched_outer")
    assert watched == [["watched_inner", "watched_outer"]]
    assert outer.MORE == 2
    importlib.import_module("watched_other")
    importlib.reload(outer)
    assert watched == [["watched_inner", "watched_outer"]], "others are not, and none twice"


def test_a_watched_module_is_as_any_other(watched: list[list[str]]) -> None:
    inner = importlib.import_module("watched_inner")
    assert inspect.getsource(inner) == FILES["watched_inner"]
    assert type(inner.__loader__) is type(importlib.import_module("watched_other").__loader__)


def test_modules_that_a_failed_one_imported_are_reported(watched: list[list[str]]) -> None:
    with pytest.raises(ImportError, match="never"):
        importlib.import_module("watched_broken")
    assert watched == [["watched_inner"]]


def test_two_watchers_of_one_module_find_it(watched: list[list[str]]) -> None:
    """As two examinations in one process, before Transformers is imported."""
    again: list[list[str]] = []
    on_demand.report_imports({"watched_inner"}, again.append)
    assert importlib.import_module("watched_inner").VALUE == 1
    assert watched == again == [["watched_inner"]]


def test_a_decorated_function_is_compiled_by_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []

    def compiling(model: object = None, **options: object) -> object:
        compiled.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compiling)
    with on_demand.examination():
        assert on_demand.active()

        @torch.compile(dynamic=True)
        def doubled(value: int) -> int:
            return 2 * value

        plain = torch.compile(lambda: 3)
        assert compiled == []
        torch.compile(torch.nn.Identity())
        assert compiled == [{}], "only functions wait"
    assert not on_demand.active()
    assert torch.compile is compiling
    assert (doubled(2), doubled(3), doubled.__name__, plain()) == (4, 6, "doubled", 3)
    assert compiled == [{}, {"dynamic": True}, {}]


def test_folders_of_models_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = []
    scan = functools.lru_cache(maxsize=1)(scanned.append)
    module = types.ModuleType("import_utils")
    vars(module)["create_import_structure_from_path"] = scan
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", module)
    on_demand._shorten_imports([])
    for folder in ("a", "b", "a", "b"):
        module.create_import_structure_from_path(folder)
    assert scanned == ["a", "b"]
    del module.create_import_structure_from_path
    on_demand._shorten_imports([])  # another version of Transformers


def test_transformers_forgets_folders() -> None:
    """Drop `_shorten_imports` when this fails: Transformers caches enough by itself then."""
    from transformers.utils import import_utils

    source = inspect.getsource(import_utils)  # another test may have replaced the function
    assert "@lru_cache\ndef create_import_structure_from_path(" in source


def test_distributions_are_listed_only_for_an_unusual_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = importlib.metadata.packages_distributions()
    calls = []

    def listing() -> dict[str, list[str]]:
        calls.append(None)
        return dict(listed)

    monkeypatch.setattr(importlib.metadata, "packages_distributions", listing)
    distribution = importlib.metadata.distribution

    def installed(name: str) -> importlib.metadata.Distribution:
        if name == "accelerate":  # another distribution installs the package
            raise importlib.metadata.PackageNotFoundError
        return distribution(name)

    with on_demand.examination():
        found = importlib.metadata.packages_distributions()
        assert (found["torch"], found["accelerate"]) == (["torch"], ["accelerate"])
        assert found.get("torch") == listed["torch"]
        assert calls == []
        assert found["yaml"] == listed["yaml"] != ["yaml"]
        assert found.get("no_such_package") is None
        assert "no_such_package" not in found
        assert dict(found).keys() == listed.keys()
        assert len(found) == len(listed)
        monkeypatch.setattr(importlib.metadata, "distribution", installed)
        assert found["accelerate"] == listed["accelerate"]
        assert calls == [None], "once"
    assert importlib.metadata.packages_distributions is listing


def test_transformers_lists_the_distributions() -> None:
    """Drop `_Distributions` when this fails."""
    from transformers.utils import import_utils

    assert "torch" in import_utils.PACKAGE_DISTRIBUTION_MAPPING
    assert "packages_distributions()" in inspect.getsource(import_utils)


@pytest.mark.parametrize(
    "text",
    ["", "import a\n", "__all__ = ['a']", "x = '__all__'\n__all__ = [\n    'a',\n    'b',\n]\nx\n",
     "__all__ = ['a']\n__all__ = ['b', 'c']", "__all__ += 1\n__all__ = ['b', 'c']\n# __all__\n"],
)  # fmt: skip
def test_names_of_a_file_are_those_transformers_finds(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import import_utils

    original = inspect.unwrap(import_utils.fetch__all__)
    copy = types.ModuleType("import_utils")
    read = []

    def fetch(content: str) -> list[str]:
        read.append(content)
        found: list[str] = original(content)
        return found

    vars(copy)["fetch__all__"] = fetch
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", copy)
    on_demand._shorten_imports([])
    assert copy.fetch__all__(text) == original(text)
    assert read[0].count("\n__all__") == 0, "nothing is left to look through"
