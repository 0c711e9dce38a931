"""Runs one kernel of a library on torch tensors. -> its outputs and counts; TwinError names a rule that it broke"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tests.fakes.ascend_c.build import LIBRARY_WORKSPACE, Library, TwinError

ANSWER_BYTES = 8 << 20
INPUT, OUTPUT, WORKSPACE = range(3)
ALL_AT_ONCE = 1  # the schedule mode in which all blocks run together, so that they can wait for each other


@dataclass(frozen=True)
class Counts:
    """The counts of a run: `buffers` by name, and `cores[core][phase]`; a phase ends where cores wait for each other.

    A phase has mte2 and mte3 (count, bytes, bursts, by_move, by_burst), instructions, repeats and conflicts by op,
    barriers by pipe, flags, scalar_ub, scalar_gm, scalar_gm_bytes and ahead.
    """

    buffers: dict[str, dict[str, int]]
    cores: list[list[dict[str, Any]]]

    @property
    def waits(self) -> int:
        return len(self.cores[0]) - 1

    @cached_property
    def total(self) -> dict[str, Any]:
        return _add([phase for phases in self.cores for phase in phases])


def _add(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds dicts of numbers and of dicts, key by key."""
    total: dict[str, Any] = {}
    for count in counts:
        for key, value in count.items():
            if isinstance(value, dict):
                total[key] = _add([total.get(key, {}), value])
            else:
                total[key] = total.get(key, 0) + value
    return total


def run(
    library: Library,
    kernel: str,
    inputs: Mapping[str, torch.Tensor | None],
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tiling: bytes,
    workspace: int = LIBRARY_WORKSPACE,
    cores: int = 48,
    key: int = 1,
    schedule_mode: int = ALL_AT_ONCE,
) -> tuple[dict[str, torch.Tensor], Counts]:
    """Runs a kernel. Inputs and outputs are in the order of the kernel's arguments; `workspace` is the number of bytes
    that the host asks for, `schedule_mode` what it sets."""
    given = {name: None if value is None else value.contiguous() for name, value in inputs.items()}
    written = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in outputs.items()}
    for tensor in written.values():
        tensor.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, so that reading an unwritten byte is noticed
    own = torch.empty(max(workspace, LIBRARY_WORKSPACE), dtype=torch.uint8)
    tensors = [*given.values(), *written.values(), own]
    names = [*given, *written, "workspace"]
    roles = [INPUT] * len(given) + [OUTPUT] * len(written) + [WORKSPACE]
    count = len(names)
    answer = ctypes.create_string_buffer(ANSWER_BYTES)
    code = library.load().twin_run(
        kernel.encode(),
        count,
        (ctypes.c_char_p * count)(*[name.encode() for name in names]),
        (ctypes.c_int * count)(*roles),
        (ctypes.c_void_p * count)(*[None if tensor is None else tensor.data_ptr() for tensor in tensors]),
        (ctypes.c_uint64 * count)(*[0 if tensor is None else tensor.nbytes for tensor in tensors]),
        tiling,
        ctypes.c_uint64(len(tiling)),
        ctypes.c_uint64(key),
        cores,
        answer,
        ctypes.c_uint64(ANSWER_BYTES),
    )
    if code == 1:
        raise TwinError(answer.value.decode())
    if code:
        raise RuntimeError(f"{kernel}: the twin's answer does not fit")
    counts = Counts(**json.loads(answer.value))
    if schedule_mode != ALL_AT_ONCE and any(len(phases) > 1 for phases in counts.cores):
        raise TwinError(
            f"{kernel}: cores that wait for each other need schedule mode {ALL_AT_ONCE}, "
            f"the host side set {schedule_mode}"
        )
    return written, counts
