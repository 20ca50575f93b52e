"""Everything imported is declared, in the base or in the extra of its commands, and the reverse."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packaging.building import ROOT
from tests.test_layering import SOURCES, imports, room

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = dict(
    line.split("==")
    for line in (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").splitlines()
    if "==" in line and not line.startswith("#")
)
# Of these the CPU path takes other versions than SGLang's pins, which are for CUDA.
OUR_VERSIONS = {"torch", "numba", "python-dateutil"}
BEHIND = {"tensorboard", "py-cpuinfo"}  # imported by torch.utils.tensorboard and ik_llama_cpp


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


BASE = names(PROJECT["dependencies"])
MAY_IMPORT = {  # folder of the package -> what it may import beyond the base
    "loadtest": names(EXTRAS["loadtest"]) | names(EXTRAS["llama"]),
    "training": names(EXTRAS["train"]),
    "evaluation": names(EXTRAS["train"]),
    "intervals": names(EXTRAS["train"]),
    "plugin": names(EXTRAS["cuda"]),
    "serving": names(EXTRAS["cuda"]) | {"fastapi"},  # SGLang's server is made of it
    "step": names(EXTRAS["cuda"]),
    "backends": names(EXTRAS["cuda"]),
    "patches": names(EXTRAS["cuda"]) | {"fastapi"},
}


@pytest.fixture(scope="module")
def distributions() -> dict[str, list[str]]:
    return {
        module: [canonicalize_name(name) for name in found]
        for module, found in packages_distributions().items()
    }


def third_party(modules: Iterable[str]) -> set[str]:
    tops = {module.split(".")[0] for module in modules}
    return tops - sys.stdlib_module_names - {"sglang_dspark", "tests", "tools", ""}


def undeclared(
    modules: Iterable[str], declared: set[str], distributions: dict[str, list[str]]
) -> list[str]:
    return [
        module
        for module in sorted(third_party(modules))
        if not declared & set(distributions.get(module, [canonicalize_name(module)]))
    ]


def test_the_product_imports_only_what_it_declares(distributions: dict[str, list[str]]) -> None:
    wrong = {
        name: bad
        for name, file in SOURCES
        if (
            bad := undeclared(
                imports(name, file), BASE | MAY_IMPORT.get(room(name), set()), distributions
            )
        )
    }
    assert wrong == {}


def test_the_tests_import_only_what_is_declared(distributions: dict[str, list[str]]) -> None:
    declared = BASE.union(*(names(EXTRAS[extra]) for extra in EXTRAS))
    wrong = {
        str(file.relative_to(ROOT)): bad
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if (bad := undeclared(imported(file), declared, distributions))
    }
    assert wrong == {}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("extra", ["", "loadtest", "train"])
def test_what_is_declared_is_imported(extra: str, distributions: dict[str, list[str]]) -> None:
    seen = third_party(i for name, file in SOURCES for i in imports(name, file))
    used = {name for module in seen for name in distributions.get(module, [])} | BEHIND
    assert sorted((names(EXTRAS[extra]) if extra else BASE) - used) == []


def test_what_sglang_needs_of_the_lock_is_in_the_cpu_extra_at_its_pins() -> None:
    ours = {canonicalize_name(r.name): r for r in map(Requirement, EXTRAS["cpu"])}
    lock = {canonicalize_name(name) for name in LOCK}
    for text in requires("sglang") or ():
        theirs = Requirement(text)
        name = canonicalize_name(theirs.name)
        if (theirs.marker and "extra" in str(theirs.marker)) or name not in lock:
            continue
        if name in OUR_VERSIONS or (name in BASE and name not in ours):
            continue
        assert name in ours, f"{text} is not in the extra `cpu`"
        assert ours[name].specifier == theirs.specifier, text


@pytest.mark.parametrize("extra", ["", "cpu", "loadtest", "train", "dev"])
def test_the_lock_is_one_of_the_environments_that_are_declared(extra: str) -> None:
    lock = {canonicalize_name(name): Version(version) for name, version in LOCK.items()}
    for text in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert lock[canonicalize_name(wanted.name)] in wanted.specifier, text
