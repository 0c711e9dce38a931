"""Runs the host side of an op (infer-shape, infer-dtype, tiling) from its unmodified op_host sources."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fakes.ascend_c.build import HERE, OP_HOST, TwinError, compile_shared

# ge::DataType
TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4, torch.int64: 9}
TYPES |= {torch.bfloat16: 27}
ANSWER_BYTES = 1 << 16
Input = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Launch:
    """The host's decisions: everything that a run of the kernel needs."""

    outputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tiling: bytes
    workspace: int
    key: int
    blocks: int
    schedule_mode: int


def host(
    op: str, inputs: Sequence[Input | None], cores: int = 48, folder: Path = OP_HOST, attributes: Sequence[int] = ()
) -> Launch:
    """Runs the host side of `op`, given by its GE type. `inputs` has one entry for each input of the definition, None
    for an optional input that is absent. `attributes` are in the definition's order; optional attributes that are left
    out have their defaults."""
    sources = sorted(folder.glob("*.cpp"))
    watched = [*folder.glob("*.h"), *(HERE / "host").rglob("*")]
    search = [f"-I{HERE / 'host'}", f"-I{folder}"]
    library = compile_shared([*sources, HERE / "host" / "host.cpp"], watched, [], search).load()
    count = len(inputs)
    ranks = [-1 if entry is None else len(entry[0]) for entry in inputs]
    dims = [dim for entry in inputs if entry is not None for dim in entry[0]]
    types = [0 if entry is None else TYPES[entry[1]] for entry in inputs]
    answer = ctypes.create_string_buffer(ANSWER_BYTES)
    with tempfile.TemporaryFile() as said:  # op_host writes the reason of a refusal to stderr
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            refused = library.twin_host(
                op.encode(),
                count,
                (ctypes.c_int * count)(*ranks),
                (ctypes.c_int64 * len(dims))(*dims),
                (ctypes.c_int * count)(*types),
                len(attributes),
                (ctypes.c_int64 * len(attributes))(*attributes),
                ctypes.c_uint32(cores),
                answer,
                ctypes.c_uint64(ANSWER_BYTES),
            )
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        reason = said.read().decode().strip()
    if refused:
        raise TwinError(f"{op}: {answer.value.decode()}. {reason}".strip())
    launched = json.loads(answer.value)
    dtypes = {number: dtype for dtype, number in TYPES.items()}
    outputs = {name: (tuple(shape), dtypes[number]) for name, (shape, number) in launched.pop("outputs").items()}
    return Launch(outputs=outputs, tiling=bytes(launched.pop("tiling")), **launched)
