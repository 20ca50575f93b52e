"""Generate mutants of a module: one small change of its syntax tree each.

Changed are comparisons, arithmetic, boolean operators, conditions, constants, dropped statements
and dropped keyword arguments. Not changed, since no test should hold it: annotations, docstrings
and other strings, what a `raise`, a `warn` or a log line says, decorators, pydantic's field texts.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
}
_EXCHANGED = {
    **{"min": "max", "max": "min", "any": "all", "all": "any"},
    **{"minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"},
    **{"floor": "ceil", "ceil": "floor", "bisect_left": "bisect_right"},
    **{"bisect_right": "bisect_left", "argmin": "argmax", "argmax": "argmin"},
}
# Calls whose arguments are words for people.
_SPOKEN = {"debug", "info", "warning", "error", "exception", "print", "warn", "print_table", "echo"}


@dataclass(frozen=True)
class Site:
    """One mutant: bytes `begin` to `end` of a file become `after`.

    file: from the repository's root. function: qualified name, "" for the module. Together with
    operator, before, after and `nth` (of several alike in the function) it names the mutant
    also after its line has moved. first, last: lines of the statement, for coverage.
    """

    file: str
    function: str
    operator: str
    before: str
    after: str
    nth: int
    begin: int
    end: int
    line: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """The mutant's name in results and in the list of equivalent ones."""
        where = f"{self.file}::{self.function or '<module>'}"
        return f"{where}: {self.operator}: {self.before} -> {self.after} #{self.nth}"

    def applied(self, source: bytes) -> bytes:
        """The mutated source. Raises ValueError where the source is another one by now."""
        mutated = source[: self.begin] + self.after.encode() + source[self.end :]
        if _one_line(source[self.begin : self.end].decode()) != self.before:
            raise ValueError(f"{self.file} has changed since its mutants were generated")
        return mutated


def generate(file: str, source: str) -> list[Site]:
    """Return all mutants of a module in order of place, skipping those that do not compile.

    Raises SyntaxError for a source that does not parse.
    """
    visitor = _Visitor(file, source)
    visitor.visit(ast.parse(source))
    return visitor.sites


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source.encode()
        self.sites: list[Site] = []
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._statement: ast.stmt | None = None
        self._known: Counter[tuple[str, ...]] = Counter()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node
            self._statement_sites(node)
            super().visit(node)
            self._statement = outer
        else:
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for each in node.body:
            self.visit(each)
        self._scope.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for each in node.body:
            self.visit(each)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people, and Python 3.11 does not say where its parts stand."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip its message, which is wording; dropping it is the statement's own mutant."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Narrows types; callers never see it fail."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        self._replace("condition", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace("condition", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for turn, sign in enumerate(node.ops):
            for other in _COMPARED[type(sign)]:
                signs = [*node.ops[:turn], other(), *node.ops[turn + 1 :]]
                changed = ast.Compare(node.left, signs, node.comparators)
                self._replace("comparison", node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        for other in () if text else _COMPUTED.get(type(node.op), ()):
            changed = ast.BinOp(node.left, other(), node.right)
            self._replace("arithmetic", node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        for other in _COMPUTED.get(type(node.op), ()):
            changed = ast.AugAssign(node.target, other(), node.value)
            self._replace("arithmetic", node, ast.unparse(changed))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace("boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
            self._replace("sign", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            self._replace("constant", node, str(value + 1))
            if value > 0:
                self._replace("constant", node, str(value - 1))
        elif isinstance(value, float):
            self._replace("constant", node, repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in _SPOKEN or name == "Field":
            return
        for dropped in node.keywords:
            if dropped.arg is not None:
                kept = [each for each in node.keywords if each is not dropped]
                changed = ast.Call(node.func, node.args, kept)
                self._replace("argument", node, ast.unparse(changed))
        if name in _EXCHANGED:
            other: ast.expr = ast.Name(_EXCHANGED[name])
            if isinstance(called, ast.Attribute):
                other = ast.Attribute(called.value, _EXCHANGED[name])
            self._replace("function", called, ast.unparse(other))
        self.generic_visit(node)

    def _statement_sites(self, node: ast.stmt) -> None:
        """Drop a statement that only has an effect; leave a loop otherwise."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name not in _SPOKEN:
                self._replace("statement", node, "pass")
        elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete)):
            self._replace("statement", node, "pass")
        elif isinstance(node, ast.Assign):
            if all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in node.targets):
                self._replace("statement", node, "pass")
        elif isinstance(node, ast.Continue):
            self._replace("statement", node, "break")
        elif isinstance(node, ast.Break):
            self._replace("statement", node, "continue")

    def _replace(self, operator: str, node: ast.expr | ast.stmt, after: str) -> None:
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = _one_line(self.source[begin:end].decode())
        mutated = self.source[:begin] + after.encode() + self.source[end:]
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError:  # e.g. a starred subscript in brackets
            return
        function = ".".join(self._scope)
        key = (function, operator, before, after)
        self._known[key] += 1
        around = self._statement or node
        # A compound statement's body has lines of its own: only its head counts.
        head = getattr(around, "body", None)
        last = head[0].lineno - 1 if head else (around.end_lineno or around.lineno)
        self.sites.append(
            Site(
                *(self.file, function, operator, before, after, self._known[key]),
                *(begin, end, node.lineno, around.lineno, max(around.lineno, last)),
            )
        )
