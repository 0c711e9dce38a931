"""L0: every call in ops/ascend binds to its op's schema, in each supported release, and relies on none of its
defaults."""

import json
from pathlib import Path

import pytest
import torch
import torch_npu

from executor.platform.ascend.versions import ROWS
from tests.ascend.schemas import RECORD, Call, all_calls, schemas_in

RECORDED: dict[str, list[str]] = json.loads(RECORD.read_text())  # schema -> the releases that have it
RELEASES = [row.release for row in ROWS]
INSTALLED = torch_npu.__version__
# Ops for tiled caches (`Abilities.tiled_cache`), which are used if torch_npu has the first of them.
TILED = ("npu_qkv_rms_norm_rope_cache", "npu_scatter_pa_kv_cache")


def schemas(release: str, op: str) -> list[torch._C.FunctionSchema]:
    """The schemas of all overloads."""
    texts = [text for text, releases in RECORDED.items() if release in releases]
    return [schema for schema in map(torch._C.parse_schema, texts) if schema.name == op]


def bound(call: Call, release: str) -> torch._C.FunctionSchema:
    """The overload that takes the call's arguments."""
    overloads = schemas(release, call.op)
    complaints = [f"torch_npu {release} has no {call.op}"] if not overloads else []
    for schema in overloads:
        unknown = call.arguments - {argument.name for argument in schema.arguments}
        missing = {a.name for a in schema.arguments if not a.has_default_value()} - call.arguments
        if not unknown and not missing:
            return schema
        complaints.append(f"{schema.name}.{schema.overload_name}: unknown {sorted(unknown)} missing {sorted(missing)}")
    raise TypeError(f"{call.where}: torch_npu {release}: {'; '.join(complaints)}")


def releases(call: Call) -> list[str]:
    """The releases in which the call is made."""
    return RELEASES if call.op not in TILED else [r for r in RELEASES if int(r.split(".")[1]) >= 10]


def left_to_defaults(call: Call) -> set[str]:
    """The arguments that every release has and that the call leaves out."""
    known = [{argument.name for argument in bound(call, release).arguments} for release in releases(call)]
    return set.intersection(*known) - call.arguments


CALLS = all_calls()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op}-{call.where}")
def test_calls_bind_in_every_release(call: Call) -> None:
    for release in releases(call):
        bound(call, release)
    assert left_to_defaults(call) == set()


def test_releases_without_ops_for_tiled_caches_have_not_the_one_that_is_asked_for() -> None:
    assert all(bool(schemas(r, TILED[0])) == (int(r.split(".")[1]) >= 10) for r in RELEASES)


def test_the_record_is_of_the_claimed_releases() -> None:
    assert {release for releases in RECORDED.values() for release in releases} == set(RELEASES)
    assert {call.op for call in CALLS} == {torch._C.parse_schema(text).name for text in RECORDED}


def test_the_record_is_what_the_installed_release_registers() -> None:
    """What the recorder reads from a library is what torch has once that library is loaded."""
    ops = {call.op for call in CALLS}
    recorded = {text for text, releases in RECORDED.items() if INSTALLED in releases}
    library = Path(torch_npu.__file__).parent / "lib/libtorch_npu.so"
    assert schemas_in(library.read_bytes(), ops) == recorded
    packets = [getattr(torch.ops.npu, op) for op in ops]
    loaded = [getattr(packet, name)._schema for packet in packets for name in packet.overloads()]
    assert {str(schema).removeprefix("npu::") for schema in loaded} == recorded
