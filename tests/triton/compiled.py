"""Compiles every kernel with triton-ascend and the real bishengir-compile, as far as they go without CANN: to the call
of hivmc, which makes device code. Ours keeps what it is handed.   python -m tests.triton.compiled FOLDER

Leaves FOLDER/<name>.mlir, or <name>.error where the compiler refused. Not for TRITON_INTERPRET=1, hence a program.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.ascend.driver import NPUUtils
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import MLIRCompilationError

from ops.triton import gating, repack

DIE = "Ascend910_9391"
HIVMC = """#!/bin/sh
[ "$1" = --version ] && exit
cp "$1" "$UMBRA_KEEP"
for last; do :; done
: >"$last.o"
"""
GATING = {
    "logits": "*bf16", "weights_out": "*fp32", "ids_out": "*i32", "rows": "i32", "stride": "i32", "experts": "i32",
    "top_k": "i32",
}  # fmt: skip
WORDS = {"words": "*i32", "out": "*i32", "count": "i32", "outputs": "i32", "inputs": "i32"}


@triton.jit
def value_by_value(words: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Something that the vector unit cannot do."""
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(words + places) >> places)


Case = tuple[Any, dict[str, str], dict[str, Any]]  # a kernel, its tensors and numbers, its constants


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for kind in ("fp32", "bf16", "fp16"):
        types = GATING | {"logits": f"*{kind}", "bias": "*fp32"}
        sizes = {"RENORMALISE": True, "BLOCK": 128, "SLOTS": 8}
        found[f"softmax_{kind}"] = gating.softmax_kernel, types, sizes
        found[f"sigmoid_{kind}"] = gating.sigmoid_kernel, types, sizes | {"BLOCK": 256}
    largest = {"RENORMALISE": False, "BLOCK": gating.MOST_EXPERTS, "SLOTS": gating.MOST_EXPERTS}
    found["softmax_largest"] = gating.softmax_kernel, GATING, largest
    found["sigmoid_largest"] = gating.sigmoid_kernel, GATING, largest | {"bias": None}
    one = dict.fromkeys(("rows", "top_k"), 1)  # Triton makes a constant of a number that is 1
    found["softmax_one_of_one"] = gating.softmax_kernel, GATING, sizes | {"SLOTS": 1} | one
    found["awq_words"] = repack.awq_words_kernel, WORDS, {"BLOCK": repack.BLOCK}
    found["compressed_words"] = repack.compressed_words_kernel, WORDS, {"TILE": repack.TILE}
    found["compressed_words_of_one"] = repack.compressed_words_kernel, WORDS, {"TILE": repack.TILE, "outputs": 1}
    for kind in ("bf16", "fp16"):
        for awq in (False, True):
            types, sizes = WORDS | {"zeros": "*i32", "out": f"*{kind}"}, {"AWQ": awq, "BLOCK": repack.BLOCK // 8}
            found[f"offsets_{kind}_{'awq' if awq else 'compressed'}"] = repack.offsets_kernel, types, sizes
    return found


def mistakes() -> dict[str, Case]:
    """What shows that the checks can fail."""
    return {
        "too_large": (repack.awq_words_kernel, WORDS, {"BLOCK": 1 << 16}),
        "value_by_value": (value_by_value, WORDS, {"BLOCK": 1024}),
    }


def main(folder: Path) -> None:
    spec = find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        sys.exit("error: ascendnpu-ir is missing: see requirements-triton-compile.txt")
    (folder / "hivmc").write_text(HIVMC)
    (folder / "hivmc").chmod(0o755)
    os.environ["PATH"] = f"{folder}:{Path(spec.origin).parent / 'bin'}:{os.environ['PATH']}"
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    NPUUtils.__init__ = lambda self: None  # which would ask the driver
    NPUUtils.get_arch = lambda self: DIE
    for name, (kernel, types, constants) in (cases() | mistakes()).items():
        os.environ["UMBRA_KEEP"] = str(folder / f"{name}.mlir")
        signature = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
        try:
            triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("npu", DIE, 0))
        except MLIRCompilationError as error:
            (folder / f"{name}.error").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
