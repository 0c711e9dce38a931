"""Writes schemas.json: the schemas of the ops that ops/ascend calls, in other releases of torch_npu.

python -m pip download --no-deps torch_npu==2.12.0              for each release
umbra_ascend_python -m tests.ascend.record_schemas *.whl        with tools/setup.sh sourced

The schemas are read from each wheel's library, which contains their text; no code of the wheel is run.
"""

import json
import re
import sys
import zipfile
from pathlib import Path

import torch

from tests.ascend.calls import all_calls

RECORD = Path(__file__).parent / "schemas.json"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def schemas_in(library: bytes, ops: set[str]) -> set[str]:
    """Each overload's schema, as torch prints it."""
    names = "|".join(sorted(ops)).encode()
    found = set()
    for text in re.findall(rb"(?<!\w)(?:%s)(?:\.\w+)?\([ -~]+\) -> [ -~]+" % names, library):
        try:
            found.add(printed(text.decode()))
        except RuntimeError:  # a signature for Python, which has other types
            continue
    return found


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
