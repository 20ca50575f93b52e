"""A mutant: one expression or statement of a function exchanged for a wrong one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from sglang_dspark.errors import DSparkError

NAME = attrgetter("name")  # of a parametrised test


@dataclass(frozen=True)
class Mutant:
    """name: unique in the whole list. area: what it breaks. file: path from the repository's root.

    function: its qualified name (`Class.method`), "" for the module. old: an expression or
    statements that occur exactly once in the function, in any layout; new: what replaces them.
    tests: files or node ids of pytest, of which at least one must fail. equivalent: why nothing
    that can be observed changes; the tests must then pass. server: the tests start servers.
    """

    name: str
    area: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""
    server: bool = False

    def applied(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises DSparkError unless `old` occurs once in the function.
        """
        expression = _is_expression(self.old) and _is_expression(self.new)
        find = _expressions if expression else _statements
        places = list(find(_scope(ast.parse(text), self.function), self.old))
        if len(places) != 1:
            raise DSparkError(
                f"mutant {self.name}: its code occurs {len(places)} times in {self.file}::"
                f"{self.function}, not once; the code has changed: write the mutant anew in "
                "tests/mutants/catalogue"
            )
        first, last = places[0]
        source, starts = text.encode(), _line_starts(text)
        begin = starts[first.lineno - 1] + first.col_offset
        end = starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
        new = self.new.replace("\n", "\n" + " " * first.col_offset)
        new = f"({new})" if expression else new
        return (source[:begin] + new.encode() + source[end:]).decode()

    def check(self, root: Path) -> None:
        """Raise DSparkError when the source has moved or a test file is gone."""
        file = root / self.file
        if not file.is_file():
            raise DSparkError(f"mutant {self.name}: {self.file} is gone: write the mutant anew")
        self.applied(file.read_text(encoding="utf-8"))
        for test in self.tests:
            if not (root / test.split("::")[0]).is_file():
                raise DSparkError(f"mutant {self.name}: its test {test} is gone: name another")


def _line_starts(text: str) -> list[int]:
    """Return the byte at which each line begins."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _scope(tree: ast.Module, function: str) -> list[ast.AST]:
    """Return the definitions of that qualified name; none where there is no such function."""
    found: list[ast.AST] = [tree]
    for name in function.split(".") if function else ():
        found = [
            node
            for each in found
            for node in ast.walk(each)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
    return found


def _is_expression(code: str) -> bool:
    body = ast.parse(code).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _expressions(scopes: list[ast.AST], old: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each place of this expression, as its first and last node."""
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    for node in (node for scope in scopes for node in ast.walk(scope)):
        if isinstance(node, ast.expr) and ast.dump(node) == wanted:
            yield node, node


def _statements(scopes: list[ast.AST], old: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the first and the last statement of each place of these statements."""
    wanted = [ast.dump(each) for each in ast.parse(old).body]
    bodies = (
        body
        for scope in scopes
        for node in ast.walk(scope)
        for _, body in ast.iter_fields(node)
        if isinstance(body, list)
    )
    for body in bodies:
        for begin in range(len(body) - len(wanted) + 1):
            part = body[begin : begin + len(wanted)]
            if [ast.dump(each) for each in part] == wanted:
                yield part[0], part[-1]
