"""The mutants of a Python file: one small change of its syntax tree each, and the rule of what is not changed.

Not changed, since tests should not fail for it: type annotations, decorators, strings and docstrings, the text of
errors and of what is printed or logged, `__repr__` and `__str__`, code under TYPE_CHECKING and
`__name__ == "__main__"`, `raise NotImplementedError` of interfaces, unions of types, and arguments of `kill`, which
could hit other processes.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from files import ROOT

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "print", "gcd", "lcm", "isclose", "minimum", "maximum"}
WORDING = {"print", "warn", "debug", "info", "warning", "error", "exception", "UserError"}
KILLS = {"kill", "killpg"}
Change = tuple[str, ast.AST]


@dataclass(frozen=True)
class Mutant:
    path: str  # relative to the root
    number: int  # of the changes of this file
    line: int
    statement: tuple[int, int]  # first and last line of the statement that it is in
    at_import: bool  # not in the body of a function
    scope: str  # the function it is in, with its classes; empty: the module's own statements
    operator: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """Without line numbers, which every edit above would move."""
        return f"{self.path} | {self.scope or '-'} | {self.old} -> {self.new}"


@dataclass(frozen=True)
class _Place:
    node: ast.expr | ast.stmt
    scope: str
    at_import: bool
    statement: ast.stmt


def mutants(path: Path, root: Path = ROOT) -> list[Mutant]:
    where, found = path.relative_to(root).as_posix(), []
    for number, (place, (operator, changed)) in enumerate(_changes(ast.parse(path.read_text()))):
        node, statement = place.node, place.statement
        head = statement.test if isinstance(statement, ast.If | ast.While) else statement
        lines = (head.lineno, head.end_lineno or head.lineno)
        old, new = _text(node), _text(changed)
        found.append(Mutant(where, number, node.lineno, lines, place.at_import, place.scope, operator, old, new))
    return found


def mutated(path: Path, number: int) -> ast.Module:
    """The tree of the file with its change `number`."""
    tree = ast.parse(path.read_text())
    for position, (place, (_, changed)) in enumerate(_changes(tree)):
        if position == number:
            new = ast.fix_missing_locations(ast.copy_location(changed, place.node))
            return cast(ast.Module, _Replace(place.node, new).visit(tree))
    raise IndexError(f"{path} has no mutant {number}")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:48] + " ... " + text[-47:]


def _changes(tree: ast.Module) -> Iterator[tuple[_Place, Change]]:
    """All places that may be changed, with one change each time."""
    for statement in tree.body:
        for place in _places(statement, _Place(statement, "", True, statement)):
            for change in _of(place.node, place.at_import):
                yield place, change


def _places(node: ast.AST, around: _Place) -> Iterator[_Place]:
    scope, statement = around.scope, around.statement
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if node.name in ("__repr__", "__str__"):
            return
        scope = f"{scope}.{node.name}".lstrip(".")
    if isinstance(node, ast.If) and _name(node.test) in ("TYPE_CHECKING", "__name__"):
        return
    place = around
    if isinstance(node, ast.expr | ast.stmt):
        place = _Place(node, scope, around.at_import, statement)
        yield place
    if isinstance(node, ast.JoinedStr | ast.Raise) or (
        isinstance(node, ast.Call) and _name(node.func) in WORDING | KILLS
    ):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            at_import = around.at_import and not (function and field == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _places(child, replace(place, at_import=at_import))


def _name(node: ast.AST) -> str:
    """The last part of a name: `b` of `a.b`; of a comparison that of its left side."""
    if isinstance(node, ast.Compare):
        node = node.left
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _of(node: ast.expr | ast.stmt, at_import: bool) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                new = deepcopy(node)
                new.ops[i] = COMPARISONS[type(operator)]()
                yield "comparison", new
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not (at_import and isinstance(op, ast.BitOr)):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node.operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "arithmetic", operand
        case ast.Constant():
            yield from _constant(node)
        case ast.Call():
            yield from _call(node)
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()) | ast.Delete():
            yield "removed statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not at_import:
            yield "removed statement", ast.Pass()
        case ast.AugAssign():
            yield "removed statement", ast.Pass()
            yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
        case ast.Raise() if node.exc is None or _name(getattr(node.exc, "func", node.exc)) != "NotImplementedError":
            yield "removed statement", ast.Pass()
        case ast.Continue():
            yield "loop", ast.Break()
        case ast.Break():
            yield "loop", ast.Continue()
        case ast.Return(value=value) if value is None:
            yield "removed statement", ast.Pass()
        case ast.Return(value=value) if not isinstance(value, ast.Constant):
            yield "return value", ast.Return(ast.Constant(None))
        case ast.If() | ast.While():
            if _negatable(node.test):
                yield "negated condition", type(node)(_not(node.test), node.body, node.orelse)
        case ast.IfExp() if _negatable(node.test):
            yield "negated condition", ast.IfExp(_not(node.test), node.body, node.orelse)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for i, part in enumerate(node.generators):
                for k, test in enumerate(part.ifs):
                    if _negatable(test):
                        changed = deepcopy(node)
                        changed.generators[i].ifs[k] = _not(test)
                        yield "negated condition", changed


def _constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 or 1.0)


def _call(node: ast.Call) -> Iterator[Change]:
    name = _name(node.func)
    if isinstance(node.func, ast.Name) and name in NAMES:
        yield "min/max, any/all", ast.Call(ast.Name(NAMES[name], ast.Load()), node.args, node.keywords)
    if len(node.args) >= 2 and name not in SYMMETRIC | WORDING | KILLS:
        first, second = node.args[:2]
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.dump(first) != ast.dump(second):
            yield "swapped arguments", ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)


def _negatable(test: ast.expr) -> bool:
    """False where another change already gives the negation."""
    equality = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], equality):
        return False
    return not isinstance(test, ast.Constant) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)
