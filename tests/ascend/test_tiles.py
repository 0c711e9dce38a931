"""The banks of unpacked experts on the fake NPU: what their op accepts, when a layer is unpacked, and who waits for
whom."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch_npu

from tests.ascend.extension import load_extension
from tests.ascend.log import device_log, ran, violations
from umbra.ops.ascend.ops import AscendOps
from umbra.ops.ascend.weights import AscendExperts
from umbra.ops.formats import Format

BF16, NPU, Q4 = torch.bfloat16, torch.device("npu"), Format("q4", 32)
TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 9, 2, 4, 128, 64


@pytest.fixture(autouse=True)
def extension() -> Iterator[None]:
    load_extension()
    torch_npu.npu.config.allow_internal_format = True
    yield
    torch_npu.npu.config.allow_internal_format = False


def layers(count: int = 3) -> tuple[AscendOps, list[AscendExperts]]:
    ops = AscendOps(BF16, NPU, "fusion_v2", gemv_tokens=8)
    return ops, [ops.expert_matrices(EXPERTS, INNER, HIDDEN, Q4, NPU) for _ in range(count)]


def step(ops: AscendOps, model: list[AscendExperts]) -> None:
    """The experts of `model`, with a kernel before each that stands for attention."""
    x, weights = (torch.zeros(TOKENS, size, dtype=BF16, device=NPU) for size in (HIDDEN, TOP_K))
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32, device=NPU)
    for experts in model:
        x = ops.moe(x.sigmoid(), weights, ids, experts, None)


STEPS = {  # what a line ends or begins with -> what happens
    "attention": ("aclnnSigmoid", ""),
    "unpack w13": ("aclnnUmbraUnpackW4a16", "true true (4,128,128)bfloat16"),
    "unpack w2": ("aclnnUmbraUnpackW4a16", "true true (4,128,64)bfloat16"),
    "product w13": ("aclnnGroupedMatmulWeightNz", "[(4,128,128)bfloat16:NZ@strides(16384,1,128)]"),
    "product w2": ("aclnnGroupedMatmulWeightNz", "[(4,64,128)bfloat16:NZ@strides(8192,1,64)]"),
}


def told(lines: list[str]) -> list[str]:
    """The attentions, and what happens to the banks."""
    steps = ([what for what, (name, part) in STEPS.items() if line.startswith(name) and part in line] for line in lines)
    return [what for names in steps for what in names]


FIRST = ["attention", "unpack w13", "product w13", "unpack w13", "unpack w2", "product w2", "unpack w2"]
NEXT = ["attention", "product w13", "unpack w13", "product w2", "unpack w2"]
LAST = ["attention", "product w13", "product w2"]


def launched(model: list[AscendExperts], ops: AscendOps) -> list[str]:
    with device_log() as log:
        step(ops, model)
    return told(log.lines)


def test_a_layer_is_unpacked_before_the_attention_that_precedes_it() -> None:
    ops, model = layers()
    assert launched(model, ops) == [*FIRST, *NEXT, *LAST]
    assert launched(model, ops) == [*FIRST, *NEXT, *LAST]  # nothing is left over from the step before
    assert launched(model[:1], ops) == FIRST  # and a step that ends early leaves the second layer in the banks
    assert launched(model, ops) == [*FIRST, *NEXT, *LAST]
    assert not violations()


@contextmanager
def stalled(stream: torch_npu.npu.Stream) -> Iterator[None]:
    """Makes everything that follows on `stream` wait until the block ends."""
    gate = threading.Event()
    torch_npu.npu._subscribe_report(stream)
    torch_npu.npu._launch_host_func(stream, lambda _: gate.wait(30), None)
    try:
        yield
    finally:
        gate.set()
        stream.synchronize()
        torch_npu.npu._unsubscribe_report(stream)


def ran_by_now() -> list[str]:
    torch_npu.npu.current_stream().npu_stream  # noqa: B018 (drains torch_npu's task queue)
    return told([line for _, line in ran()])


def while_the_side_stalls() -> list[str]:
    """Returns the kernels of layer 2 that run while its unpacking, which layer 1 began, cannot end."""
    ops, model = layers(2)
    assert ops.tiles is not None
    with device_log():
        step(ops, model[:1])
        torch.npu.synchronize()
        ran()
        with stalled(ops.tiles.side):
            for experts in (model[0].w13, model[0].w2):
                assert experts.values is not None
                experts.values.release(experts)
            step(ops, model[1:])
            return ran_by_now()


def while_the_main_stream_stalls() -> list[str]:
    """Returns the kernels that the side stream runs while the products of layer 1 cannot."""
    ops, model = layers(2)
    with device_log(), stalled(torch_npu.npu.current_stream()):
        step(ops, model)
        return ran_by_now()


def test_products_wait_for_their_values_and_attention_does_not() -> None:
    assert while_the_side_stalls() == ["attention"]


def test_a_bank_is_not_overwritten_before_the_product_that_reads_it() -> None:
    assert while_the_main_stream_stalls() == []
