"""The rules of the architecture, read from the syntax: who may import whom, and file habits."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {  # import name -> folder; three of them stand at the top of the repository
    "sglang_dspark": ROOT / "sglang_dspark",
    "sglang_dspark.kernels": ROOT / "kernels",
    "sglang_dspark.patches": ROOT / "patches",
    "sglang_dspark.loadtest": ROOT / "loadtest",
}
SGLANG_MAY_BE_IMPORTED_IN = (
    "sglang_dspark.serving",
    "sglang_dspark.step",
    "sglang_dspark.backends",
    "sglang_dspark.patches",
    "sglang_dspark.plugin",
)
PURE = {
    "common",
    "models",
    "drafter",
    "families",
    "verify",
    "schedule",
    "quantisation",
    "experts",
    "evaluation",
    "training",
    "kernels",
    "benchmarks",
}
ADAPTERS = {"serving", "step", "backends", "patches", "plugin", "loadtest", "cli"}
ABOVE_BACKENDS = {"patches", "plugin", "loadtest", "cli"}  # what serves must not know
KERNEL_IMPORTS = {"numpy", "torch", "triton"}
MAX_LINES = 450
MAX_FUNCTION_LINES = 40


def sources() -> list[tuple[str, Path]]:
    """Every module of ours as (dotted name, file)."""
    found = []
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            found.append((name, file))
    return found


SOURCES = sources()
IDS = [name for name, _ in SOURCES]


def imports(name: str, file: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it; relative ones are resolved."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room(name: str) -> str:
    """First folder below the package: `sglang_dspark.drafter.model` -> `drafter`."""
    return name.split(".")[1] if "." in name else ""


def rooms_taken(name: str, file: Path) -> set[str]:
    """Other rooms, and modules beside them, that a module imports from."""
    ours = {room(i) for i in imports(name, file) if within(i, "sglang_dspark")}
    return ours - {"", room(name)}


def test_all_folders_are_seen() -> None:
    rooms = {room(name) for name in IDS}
    assert {"drafter", "verify", "serving", "patches", "kernels", "loadtest", "cli"} <= rooms


@pytest.mark.parametrize(
    ("name", "file"), [each for each in SOURCES if within(each[0], "sglang_dspark.step")]
)
def test_the_step_knows_no_device(name: str, file: Path) -> None:
    """Devices implement what the step asks for; the step never asks which one it is on."""
    devices = ("sglang_dspark.backends", "sglang_dspark.kernels")
    taken = [each for each in imports(name, file) if any(within(each, d) for d in devices)]
    assert taken == []


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_only_the_adapter_imports_sglang(name: str, file: Path) -> None:
    if any(within(name, allowed) for allowed in SGLANG_MAY_BE_IMPORTED_IN):
        return
    assert [i for i in imports(name, file) if within(i, "sglang")] == []


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_nothing_imports_the_command_line(name: str, file: Path) -> None:
    if within(name, "sglang_dspark.cli"):
        return
    assert [i for i in imports(name, file) if within(i, "sglang_dspark.cli")] == []


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_the_core_does_not_lean_on_the_adapters(name: str, file: Path) -> None:
    if room(name) not in PURE:
        return
    assert rooms_taken(name, file) & ADAPTERS == set()


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_backends_know_neither_the_patches_nor_the_load_tester(name: str, file: Path) -> None:
    """The patches call what serves, never the other way; who must know both is an entry point."""
    if room(name) in ("serving", "step", "backends"):
        assert rooms_taken(name, file) & ABOVE_BACKENDS == set()


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_what_is_common_needs_no_other_room(name: str, file: Path) -> None:
    if room(name) == "common":
        modules = {module.stem for module in PACKAGES["sglang_dspark"].glob("*.py")}
        assert rooms_taken(name, file) - modules == set()


def test_rooms_form_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for name, file in SOURCES:
        below.setdefault(room(name), set()).update(rooms_taken(name, file))
    tuple(TopologicalSorter(below).static_order())  # a CycleError names the rooms


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_rooms_use_only_public_names_of_each_other(name: str, file: Path) -> None:
    private = [
        i
        for i in imports(name, file)
        if within(i, "sglang_dspark")
        and room(i) != room(name)
        and any(part.startswith("_") and not part.startswith("__") for part in i.split("."))
    ]
    assert private == []


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_kernels_import_torch_triton_and_numpy_only(name: str, file: Path) -> None:
    """Their benchmarks too: a folder to copy to a machine that has nothing else."""
    ours = ("sglang_dspark.kernels", "sglang_dspark.benchmarks")
    if not any(within(name, each) for each in ours):
        return
    outside = {
        i.split(".")[0]
        for i in imports(name, file)
        if not any(within(i, each) for each in ours)
        and i.split(".")[0] not in sys.stdlib_module_names
    }
    assert outside - KERNEL_IMPORTS == set()


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_nothing_unpickles(name: str, file: Path) -> None:
    """Weights and data are safetensors, JSON or arrays: a pickle runs code of whoever wrote it."""
    assert [i for i in imports(name, file) if i.split(".")[0] in ("pickle", "dill", "joblib")] == []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        assert (owner, node.func.attr) != ("torch", "load"), f"torch.load in line {node.lineno}"
        if node.func.attr == "load" and owner in ("np", "numpy"):
            allow = [k for k in node.keywords if k.arg == "allow_pickle"]
            assert all(ast.literal_eval(k.value) is False for k in allow), f"line {node.lineno}"


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_every_file_says_what_it_is_and_stays_small(name: str, file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{file} has no module docstring"
    assert len(text.splitlines()) < MAX_LINES, f"{file} is too long: split it by role"


@pytest.mark.parametrize(("name", "file"), SOURCES, ids=IDS)
def test_every_function_stays_small(name: str, file: Path) -> None:
    long = {
        node.name: lines
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, f"{file}: split by meaning what is over {MAX_FUNCTION_LINES} lines"


def test_the_guards_see_what_they_forbid(tmp_path: Path) -> None:
    """A positive control: without it, a parser that finds nothing would pass everything."""
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from sglang.srt import x\n    from ..cli.main import app\n")
    seen = list(imports("sglang_dspark.drafter.bad", bad))
    assert "sglang.srt.x" in seen
    assert "sglang_dspark.cli.main.app" in seen


def test_every_folder_of_modules_is_installed() -> None:
    """An editable install hides a package that pyproject forgot."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {
        ".".join((package, *file.parent.relative_to(folder).parts))
        for package, folder in PACKAGES.items()
        for file in folder.rglob("__init__.py")
    }
    assert folders <= listed
