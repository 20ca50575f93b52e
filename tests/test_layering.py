"""The rules of the architecture, read from the syntax: who may import whom, and file habits."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {  # import name -> folder; three of them are at the top of the repository
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
Offenders = dict[str, list[str]]  # module -> what breaks the rule in it; an empty list: nothing


def broken(offenders: Offenders) -> Offenders:
    """Return only the modules that break a rule."""
    return {name: found for name, found in offenders.items() if found}


@cache
def tree_of(file: Path) -> ast.Module:
    """Parse a source file; once for all rules."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(name: str, file: Path) -> tuple[str, ...]:
    """Dotted names that a module imports anywhere in it; relative ones are resolved."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(found)


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
    rooms = {room(name) for name, _ in SOURCES}
    assert {"drafter", "verify", "serving", "patches", "kernels", "loadtest", "cli"} <= rooms


def test_the_step_knows_no_device() -> None:
    """Devices implement what the step asks for; the step never asks which one it is on."""
    devices = ("sglang_dspark.backends", "sglang_dspark.kernels")
    modules = [each for each in SOURCES if within(each[0], "sglang_dspark.step")]
    assert modules
    assert not broken(
        {
            name: [i for i in imports(name, file) if any(within(i, d) for d in devices)]
            for name, file in modules
        }
    )


def test_only_the_adapter_imports_sglang() -> None:
    assert not broken(
        {
            name: [i for i in imports(name, file) if within(i, "sglang")]
            for name, file in SOURCES
            if not any(within(name, allowed) for allowed in SGLANG_MAY_BE_IMPORTED_IN)
        }
    )


def test_nothing_imports_the_command_line() -> None:
    assert not broken(
        {
            name: [i for i in imports(name, file) if within(i, "sglang_dspark.cli")]
            for name, file in SOURCES
            if not within(name, "sglang_dspark.cli")
        }
    )


def test_the_core_does_not_lean_on_the_adapters() -> None:
    assert not broken(
        {
            name: sorted(rooms_taken(name, file) & ADAPTERS)
            for name, file in SOURCES
            if room(name) in PURE
        }
    )


def test_backends_know_neither_the_patches_nor_the_load_tester() -> None:
    """The patches call what serves, never the other way; who must know both is an entry point."""
    assert not broken(
        {
            name: sorted(rooms_taken(name, file) & ABOVE_BACKENDS)
            for name, file in SOURCES
            if room(name) in ("serving", "step", "backends")
        }
    )


def test_what_is_common_needs_no_other_room() -> None:
    modules = {module.stem for module in PACKAGES["sglang_dspark"].glob("*.py")}
    assert not broken(
        {
            name: sorted(rooms_taken(name, file) - modules)
            for name, file in SOURCES
            if room(name) == "common"
        }
    )


def test_rooms_form_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for name, file in SOURCES:
        below.setdefault(room(name), set()).update(rooms_taken(name, file))
    tuple(TopologicalSorter(below).static_order())  # a CycleError names the rooms


def private_names(name: str, file: Path) -> list[str]:
    """Private names that a module imports from other rooms."""
    return [
        i
        for i in imports(name, file)
        if within(i, "sglang_dspark")
        and room(i) != room(name)
        and any(part.startswith("_") and not part.startswith("__") for part in i.split("."))
    ]


def test_rooms_use_only_public_names_of_each_other() -> None:
    assert not broken({name: private_names(name, file) for name, file in SOURCES})


def test_kernels_import_torch_triton_and_numpy_only() -> None:
    """Their benchmarks too: a folder to copy to a machine that has nothing else."""
    ours = ("sglang_dspark.kernels", "sglang_dspark.benchmarks")
    assert not broken(
        {
            name: [
                i
                for i in imports(name, file)
                if not any(within(i, each) for each in ours)
                and i.split(".")[0] not in sys.stdlib_module_names | KERNEL_IMPORTS
            ]
            for name, file in SOURCES
            if any(within(name, each) for each in ours)
        }
    )


def unpickled(tree: ast.Module) -> list[str]:
    """Calls that may read a pickle."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if (owner, node.func.attr) == ("torch", "load"):
            found.append(f"torch.load in line {node.lineno}")
        if node.func.attr == "load" and owner in ("np", "numpy"):
            allow = [k for k in node.keywords if k.arg == "allow_pickle"]
            if not all(ast.literal_eval(k.value) is False for k in allow):
                found.append(f"allow_pickle in line {node.lineno}")
    return found


def test_nothing_unpickles() -> None:
    """Weights and data are safetensors, JSON or arrays: a pickle runs its code when it is read."""
    pickles = ("pickle", "dill", "joblib")
    assert not broken(
        {
            name: [
                *(i for i in imports(name, file) if i.split(".")[0] in pickles),
                *unpickled(tree_of(file)),
            ]
            for name, file in SOURCES
        }
    )


def test_every_file_says_what_it_is_and_stays_small() -> None:
    assert [name for name, file in SOURCES if not ast.get_docstring(tree_of(file))] == []
    lengths = {name: len(file.read_text("utf-8").splitlines()) for name, file in SOURCES}
    long = {name: lines for name, lines in lengths.items() if lines >= MAX_LINES}
    assert long == {}, "split them by role"


def long_functions(tree: ast.Module) -> list[str]:
    """Functions over the limit, with their lines."""
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def test_every_function_stays_small() -> None:
    long = broken({name: long_functions(tree_of(file)) for name, file in SOURCES})
    assert long == {}, f"split by meaning what is over {MAX_FUNCTION_LINES} lines"


def test_the_guards_see_what_they_forbid(tmp_path: Path) -> None:
    """A positive control: without it, a parser that finds nothing would pass everything."""
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from sglang.srt import x\n    from ..cli.main import app\n")
    seen = list(imports("sglang_dspark.drafter.bad", bad))
    assert "sglang.srt.x" in seen
    assert "sglang_dspark.cli.main.app" in seen
    assert (
        len(unpickled(ast.parse("torch.load(f)\nnp.load(f, allow_pickle=True)\nnp.load(f)"))) == 2
    )
    assert long_functions(ast.parse("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES))
    private = tmp_path / "private.py"
    private.write_text("from sglang_dspark.verify import _hidden\n")
    assert private_names("sglang_dspark.cli.private", private) == ["sglang_dspark.verify._hidden"]


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
