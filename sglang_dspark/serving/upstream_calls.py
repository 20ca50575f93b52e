"""Compare our calls of SGLang's functions and classes with their parameters, read as text.

`upstream_check` finds names that are gone. A function that still exists may have a renamed or a
new parameter, a class a renamed field, an enumeration a renamed member: our calls name these. Only
`dspark doctor` runs this, as parsing our files needs seconds. Calls with `**options` in the
definition, or to definitions outside of SGLang, are not compared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from sglang_dspark.serving import upstream
from sglang_dspark.serving.upstream_check import adapter_files, syntax

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = tuple[str, ast.AST]  # module of SGLang, and the syntax in it


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function or class. positional: in order. required: those without default."""

    positional: tuple[str, ...]
    keywords: frozenset[str]
    required: frozenset[str]


def mismatches() -> list[str]:
    """Return one line for each member or argument that we use and SGLang does not have."""
    users: dict[str, set[str]] = {}
    for file, text in adapter_files():
        if "upstream." not in text:
            continue
        for name, member, call in _uses(ast.parse(text)):
            for line in _wrong(name, member, call):
                users.setdefault(line, set()).add(file)
    return [f"{line} (used by {', '.join(sorted(users[line]))})" for line in sorted(users)]


def _uses(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call | None]]:
    """Yield name, member and call of each `upstream.NAME.MEMBER` and `upstream.NAME(...)`.

    member: empty for the name itself. call: None where it is not called.
    """
    for node in ast.walk(tree):
        call = node if isinstance(node, ast.Call) else None
        used = node if call is None else call.func
        names: list[str] = []
        while isinstance(used, ast.Attribute):
            names.insert(0, used.attr)
            used = used.value
        if isinstance(used, ast.Name) and used.id == "upstream" and len(names) in (1, 2):
            yield names[0], "".join(names[1:]), call


def _wrong(name: str, member: str, call: ast.Call | None) -> Iterator[str]:
    """Yield the parts of this use of a name that SGLang's definition lacks."""
    if name not in upstream.PLACES:
        return
    label = ".".join(upstream.PLACES[name])
    found = _definition(*upstream.PLACES[name])
    if member and found is not None:
        members = _members(found)
        if not isinstance(found[1], ast.ClassDef) or member.startswith("__"):
            return
        if member not in members:
            yield f"{label} has no {member} any more"
            return
        label, found = f"{label}.{member}", members[member]
    parameters = None if call is None or found is None else _parameters(found)
    if call is None or parameters is None:
        return
    given = [each.arg for each in call.keywords]
    for each in given:
        if each is not None and each not in parameters.keywords:
            yield f"{label} has no argument {each} any more"
    if None in given or any(isinstance(each, ast.Starred) for each in call.args):
        return
    for each in sorted(parameters.required - {*given, *parameters.positional[: len(call.args)]}):
        yield f"{label} requires the argument {each}, which our call does not give"


@cache
def _definition(module: str, name: str) -> Definition | None:
    """Find the function or class of a name in a module, or where the module imports it from.

    For an object that a module makes, for example `envs = Envs()`: its class.
    """
    tree = syntax(module)
    for node in [] if tree is None else reversed(tree.body):
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            for each in node.names:
                if name == (each.asname or each.name):
                    return _definition(str(node.module), each.name)
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
            made = node.value.func if isinstance(node.value, ast.Call) else None
            return _definition(module, made.id) if isinstance(made, ast.Name) else None
    return None


def _members(owner: Definition) -> dict[str, Definition]:
    """Return methods, fields and constants of a class, first those of its bases in SGLang."""
    module, node = owner
    members: dict[str, Definition] = {}
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        above = _definition(module, ast.unparse(base))
        members |= {} if above is None else _members(above)
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, Function | ast.ClassDef):
            members[each.name] = module, each
        elif isinstance(each, ast.AnnAssign):
            members[ast.unparse(each.target)] = module, each
        elif isinstance(each, ast.Assign):
            members |= {ast.unparse(target): (module, each) for target in each.targets}
    return members


def _fields(owner: Definition) -> dict[str, ast.AnnAssign]:
    """Return the fields that are arguments of a class; none if it has an `__init__`."""
    module, node = owner
    if not isinstance(node, ast.ClassDef) or any(
        isinstance(each, Function) and each.name == "__init__" for each in node.body
    ):
        return {}
    fields: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        above = _definition(module, ast.unparse(base))
        fields |= {} if above is None else _fields(above)
    own = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return fields | {
        ast.unparse(each.target): each
        for each in own
        if "ClassVar" not in ast.unparse(each.annotation)
    }


def _parameters(found: Definition) -> Parameters | None:
    """Return the parameters of a function, or of a class by `__init__` or fields; None: unknown."""
    node = found[1]
    if isinstance(node, ast.ClassDef):
        fields = _fields(found)
        if fields:
            required = frozenset(name for name, each in fields.items() if each.value is None)
            return Parameters(tuple(fields), frozenset(fields), required)
        made = _members(found).get("__init__")
        return None if made is None else _parameters(made)
    if not isinstance(node, Function) or node.args.kwarg is not None:
        return None
    arguments = [*node.args.posonlyargs, *node.args.args]
    names = [each.arg for each in arguments]
    optional = names[len(names) - len(node.args.defaults) :] if node.args.defaults else []
    alone = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    needed = {*names} - {*optional} | {each.arg for each, value in alone if value is None}
    bound = {"self", "cls"} & {*names[:1]}  # bound by the class or the object
    keywords = {*names, *(each.arg for each in node.args.kwonlyargs)}
    return Parameters(
        tuple(names[len(bound) :]), frozenset(keywords - bound), frozenset(needed - bound)
    )
