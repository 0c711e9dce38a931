"""tests/ascend runs the real torch_npu and torchair on a fake CANN (tests/fakes/cann), in .venv/ascend: see test.sh."""

from collections.abc import Iterator

import pytest

# Loaded before any test module uses torch.npu.
import torch
import torch_npu  # noqa: F401  (registers the npu device)
from torch import Tensor
from torch._guards import detect_fake_mode

from tests.ascend.log import violations
from umbra.executor.engine.step import batching
from umbra.ops.ascend import layout
from umbra.ops.interface import Numbers, tensor_of


@pytest.fixture(autouse=True)
def first_device() -> None:
    torch.npu.set_device(0)


@pytest.fixture(autouse=True)
def no_rule_is_broken() -> Iterator[None]:
    yield
    assert not violations()


@pytest.fixture(autouse=True)
def numbers_become_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeTensorMode does not see tensors that are made from memory."""

    def fake_tensor(numbers: Numbers) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64) if detect_fake_mode() else tensor_of(numbers)

    monkeypatch.setattr(layout, "tensor_of", fake_tensor)
    monkeypatch.setattr(batching, "tensor_of", fake_tensor)


@pytest.fixture
def private_formats() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False
