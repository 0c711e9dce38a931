"""The calls of torch_npu's ops in ops/ascend, found in the source, since a run could miss branches."""

import ast
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).parents[2] / "ops/ascend"


@dataclass(frozen=True)
class Call:
    where: str  # file:line
    op: str
    arguments: frozenset[str]


def calls_in(source: str, file: str) -> list[Call]:
    """Every `module.npu_*(...)`. An argument without a name, or an op that is passed on uncalled, is refused."""
    tree = ast.parse(source)
    found, called = [], set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and _is_op(node.func)):
            continue
        assert isinstance(node.func, ast.Attribute)
        op, where = node.func.attr, f"{file}:{node.lineno}"
        names = [keyword.arg for keyword in node.keywords]
        if node.args or None in names:
            raise ValueError(f"{where}: {op} has arguments without names")
        found.append(Call(where, op, frozenset(name for name in names if name)))
        called.add(node.func)
    for node in ast.walk(tree):
        if _is_op(node) and node not in called:
            raise ValueError(f"{file}: {ast.unparse(node)} is not called where it is named")
    return found


def all_calls() -> list[Call]:
    return [call for path in sorted(OPS.rglob("*.py")) for call in calls_in(path.read_text(), path.name)]


def _is_op(node: ast.AST) -> bool:
    of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return of_module and node.attr.startswith("npu_")
