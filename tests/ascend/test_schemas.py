"""L0: every call in ops/ascend binds to its op's schema, in each supported release, and relies on none of its
defaults."""

import json
from pathlib import Path

import pytest
import torch
import torch_npu

from tests.ascend.schemas import RECORD, Call, all_calls, schemas_in
from umbra.executor.platform.ascend.versions import ROWS

RECORDED: dict[str, list[str]] = json.loads(RECORD.read_text())  # schema -> the releases that have it
RELEASES = [row.release for row in ROWS]
INSTALLED = torch_npu.__version__
# The first minor release with each op that not all have, and that is not called without: ops for tiled caches
# (`Abilities.tiled_cache`), which are used if torch_npu has the first of them, as are the SwiGLU between products of
# int8, whose types 2.9 numbered otherwise, and the norm that rounds, whose type 2.9 does not take;
# and the clipped SwiGLU and the op before attention over latents, which are used if it has the latter.
SINCE = {"npu_qkv_rms_norm_rope_cache": 10, "npu_scatter_pa_kv_cache": 10, "npu_grouped_matmul_swiglu_quant_v2": 10}
SINCE |= {"npu_add_rms_norm_dynamic_quant": 10, "npu_clipped_swiglu": 9, "npu_mla_prolog_v3": 9}


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
    return [r for r in RELEASES if int(r.split(".")[1]) >= SINCE.get(call.op, 0)]


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


@pytest.mark.parametrize("op", ["npu_qkv_rms_norm_rope_cache", "npu_clipped_swiglu", "npu_mla_prolog_v3"])
def test_earlier_releases_have_not_the_op_that_is_asked_for(op: str) -> None:
    assert all(bool(schemas(r, op)) == (int(r.split(".")[1]) >= SINCE[op]) for r in RELEASES)


def test_the_record_is_of_the_claimed_releases() -> None:
    assert {release for releases in RECORDED.values() for release in releases} == set(RELEASES)
    assert {call.op for call in CALLS} == {torch._C.parse_schema(text).name for text in RECORDED}


def test_the_record_is_what_the_installed_release_registers() -> None:
    """The recorder reads from a library the schemas that torch has once the library is loaded."""
    ops = {call.op for call in CALLS}
    recorded = {text for text, releases in RECORDED.items() if INSTALLED in releases}
    library = Path(torch_npu.__file__).parent / "lib/libtorch_npu.so"
    assert schemas_in(library.read_bytes(), ops) == recorded
    packets = [getattr(torch.ops.npu, op) for op in ops]
    loaded = [getattr(packet, name)._schema for packet in packets for name in packet.overloads()]
    assert {str(schema).removeprefix("npu::") for schema in loaded} == recorded
