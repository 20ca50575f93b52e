"""Compare the tables of SGLang names that we use with the installed SGLang.

The names of a loaded module are read from it, any other module is read as text. So a check imports
nothing: it is fast enough for a server's start, and a name of a module that only another device can
import does not count as missing. Attributes and function bodies are always read as text, because
hooks replace loaded objects.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import upstream
from sglang_dspark.serving.startup import WHAT_TO_DO
from sglang_dspark.serving.upstream_uses import ATTRIBUTES, REIMPLEMENTED

OURS = Path(__file__).resolve().parents[1]  # sglang_dspark/, with links to patches/ and others
_BOUND = re.compile(  # a top-level definition, assignment or import
    r"^(?:(?:async )?def|class) +(\w+)|^(\w+) *[:=]|^from [\w.]+ import +(\([^)]*\)|[^\n]*)",
    re.MULTILINE,
)
_ADAPTERS = ("serving", "step", "backends", "patches")  # the folders that use SGLang
_TABLES = ("upstream.py", "upstream_check.py", "upstream_uses.py")
_HASH_DIGITS = 16  # of the sha256, enough to detect a change


def counts() -> dict[str, int]:
    """Count the entries of the tables, by kind."""
    return {
        "names": len(upstream.PLACES) + len(upstream.MODULES),
        "attributes": sum(len(a) for classes in ATTRIBUTES.values() for a in classes.values()),
        "bodies": sum(map(len, REIMPLEMENTED.values())),
    }


def missing() -> list[str]:
    """Return one line for each name and attribute of the tables that SGLang does not have."""
    lines = []
    for module, names in upstream.NAMES.items():
        lines += _missing_names(module, [text.partition(" as ")[0] for text in names])
    for module in upstream.MODULES.values():
        lines += _missing_names(module, [])
    for module, classes in ATTRIBUTES.items():
        for name, attributes in classes.items():
            lines += _missing_attributes(module, name, attributes)
    return lines


def require_all() -> None:
    """Raise `DSparkError` with the first line of `missing`, if there is one."""
    lines = missing()
    if lines:
        more = f" ({len(lines)} such names: run `dspark doctor`)" if len(lines) > 1 else ""
        raise DSparkError(f"{lines[0]}{more}; {WHAT_TO_DO}")


def changed_bodies() -> list[str]:
    """Return one line for each re-implemented function whose body changed."""
    lines = []
    for module, functions in REIMPLEMENTED.items():
        for path, (known, ours) in functions.items():
            found = body_hash(module, path)
            if found is None:
                lines.append(f"SGLang has no {module}.{path} any more, which {ours} re-implements")
            elif found != known:
                lines.append(
                    f"body changed: read {module}.{path} again, which {ours} re-implements"
                )
    return lines


def body_hash(module: str, path: str) -> str | None:
    """Return the hash of a function's or class's syntax; None if SGLang has none of that name.

    path: in the module, e.g. `LlamaModel.forward`. Comments, layout and docstrings do not count.
    """
    node: ast.AST | None = syntax(module)
    if node is None:
        return None
    for part in path.split("."):
        found = [each for each in _definitions(node) if each.name == part]
        if not found:
            return None
        node = found[-1]  # the last definition is the effective one
    return hashlib.sha256(_shape(node).encode()).hexdigest()[:_HASH_DIGITS]


def has_module(name: str) -> bool:
    """Return whether SGLang has a module or package of this dotted name, without importing it."""
    return name.startswith("sglang.") and _file(name) is not None


def syntax(module: str) -> ast.Module | None:
    """Return the syntax of a module of SGLang; None if there is no such module."""
    text = _text(module)
    return None if text is None else _parsed(text)


def _missing_names(module: str, names: list[str]) -> list[str]:
    loaded = sys.modules.get(module)
    if loaded is not None:
        absent = [name for name in names if not hasattr(loaded, name)]
    else:
        text = _text(module)
        if text is None:
            return [f"SGLang has no module {module} any more{_used_by(*_ours(module))}"]
        bound = _bound_names(text)
        absent = [name for name in names if name not in bound]
    return [
        f"SGLang has no {module}.{name} any more{_used_by(*_ours(module, name))}" for name in absent
    ]


def _missing_attributes(module: str, name: str, attributes: tuple[str, ...]) -> list[str]:
    """List missing attributes. name: of the class; "" for attributes used outside of a class."""
    text = _text(module)
    if text is None:
        return [f"SGLang has no module {module} any more{_used_by(*attributes)}"]
    owner = f"{module}.{name}".rstrip(".")
    if not name:
        absent = [each for each in attributes if not re.search(rf"\b{each}\b", text)]
    else:
        body = _class_body(text, name)
        if body is None:
            return [f"SGLang has no class {owner} any more{_used_by(*attributes)}"]
        absent = [each for each in attributes if not _assigns(body, each)]
    return [f"{owner} has no {each} any more{_used_by(each)}" for each in absent]


def _ours(module: str, name: str | None = None) -> list[str]:
    """Return our names for a name of a module of SGLang, or for every name of the module."""
    found = [here for here, place in upstream.PLACES.items() if place[0] == module]
    found += [here for here, there in upstream.MODULES.items() if there == module]
    return [h for h in found if name is None or upstream.PLACES[h][1] == name]


def _used_by(*names: str) -> str:
    """Return " (used by ...)" with the files of ours that mention one of the names."""
    pattern = re.compile(rf"\.(?:{'|'.join(names)})\b|\"(?:{'|'.join(names)})\"")
    files = [file for file, text in adapter_files() if pattern.search(text)]
    return f" (used by {', '.join(files)})" if files else ""


def adapter_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of each file of ours that may use SGLang, except the tables."""
    files = {*OURS.rglob("*.py"), *(OURS / "patches").rglob("*.py")}
    for file in sorted(files):
        path = file.relative_to(OURS)
        if path.parts[0] in _ADAPTERS and path.name not in _TABLES:
            yield path.as_posix(), file.read_text(encoding="utf-8")


@cache
def _root() -> Path:
    """Return the folder that contains the package sglang."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise DSparkError(f"sglang is not installed; {WHAT_TO_DO}")
    return Path(spec.submodule_search_locations[0]).parent


def _file(module: str) -> Path | None:
    path = _root().joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def _text(module: str) -> str | None:
    file = _file(module)
    return None if file is None else file.read_text(encoding="utf-8")


def _bound_names(text: str) -> set[str]:
    """Return the names that a module's text defines, assigns or imports at its top level."""
    found: set[str] = set()
    for defined, assigned, imported in _BOUND.findall(text):
        found.update(re.findall(r"\w+", imported) if imported else (defined or assigned,))
    return found


def _class_body(text: str, name: str) -> str | None:
    """Return the text of a top-level class, up to the next unindented statement."""
    found = re.search(rf"^class {name}\b.*?(?=^[A-Za-z_@]|\Z)", text, re.MULTILINE | re.DOTALL)
    return None if found is None else found.group()


def _assigns(body: str, name: str) -> bool:
    """Return whether a class's text has a method or field of this name, or assigns it."""
    pattern = rf"def {name}\b|^    {name}\b *[:=]|\b(?:self|cls)\.{name}\b *(?::[^=\n]+)?=[^=]"
    return re.search(pattern, body, re.MULTILINE) is not None


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _definitions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, kinds)]


def _shape(value: object) -> str:
    """Return the syntax of a node as text that is the same in every version of Python we run on.

    `ast.dump` prints fields that newer versions added; empty fields are skipped here.
    """
    if isinstance(value, list):
        return "[" + ",".join(_shape(each) for each in value) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: getattr(value, name, None) for name in value._fields}
    if isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(value):
        fields["body"] = value.body[1:]
    given = [f"{name}={_shape(each)}" for name, each in fields.items() if each not in (None, [])]
    return f"{type(value).__name__}({','.join(given)})"
