"""The calls of torch_npu's ops in ops/ascend, found in the source, since a run could miss branches; and schemas.json:
the schemas of these ops in other releases of torch_npu, written by

python -m pip download --no-deps torch_npu==2.12.0       for each release
umbra_ascend_python -m tests.ascend.schemas *.whl        with tools/setup.sh sourced

which reads them from each wheel's library, which contains their text; no code of the wheel is run.
"""

import ast
import json
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

RECORD = Path(__file__).parent / "schemas.json"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
OPS = Path(__file__).parents[2] / "ops/ascend"


@dataclass(frozen=True)
class Call:
    where: str  # file:line
    op: str
    arguments: frozenset[str]


def calls_in(source: str, file: str) -> list[Call]:
    """Every `module.npu_*(...)`. An argument without a name, or an op that is passed on uncalled, is refused."""
    tree = ast.parse(source)
    calls, called = [], set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and _is_op(node.func)):
            continue
        assert isinstance(node.func, ast.Attribute)
        op, where = node.func.attr, f"{file}:{node.lineno}"
        names = [keyword.arg for keyword in node.keywords]
        if node.args or None in names:
            raise ValueError(f"{where}: {op} has arguments without names")
        calls.append(Call(where, op, frozenset(name for name in names if name)))
        called.add(node.func)
    for node in ast.walk(tree):
        if _is_op(node) and node not in called:
            raise ValueError(f"{file}: {ast.unparse(node)} is not called where it is named")
    return calls


def all_calls() -> list[Call]:
    return [call for path in sorted(OPS.rglob("*.py")) for call in calls_in(path.read_text(), path.name)]


def _is_op(node: ast.AST) -> bool:
    of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return of_module and node.attr.startswith("npu_")


def schemas_in(library: bytes, ops: set[str]) -> set[str]:
    """Each overload's schema, as torch prints it."""
    names = "|".join(sorted(ops)).encode()
    schemas = set()
    for text in re.findall(rb"(?<!\w)(?:%s)(?:\.\w+)?\([ -~]+\) -> [ -~]+" % names, library):
        try:
            schemas.add(printed(text.decode()))
        except RuntimeError:  # a signature for Python, which has other types
            continue
    return schemas


def printed(schema: str) -> str:
    return str(torch._C.parse_schema(schema))


def main(wheels: list[str]) -> None:
    ops = {call.op for call in all_calls()}
    record = {}
    for wheel in wheels:
        release = Path(wheel).name.split("-")[1]
        with zipfile.ZipFile(wheel) as files:
            record[release] = schemas_in(files.read(LIBRARY), ops)
    releases = sorted(record, key=lambda release: [int(part) for part in release.split(".")])
    schemas = sorted(set().union(*record.values()))
    lines = {schema: [release for release in releases if schema in record[release]] for schema in schemas}
    RECORD.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
