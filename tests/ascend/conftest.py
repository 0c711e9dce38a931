"""tests/ascend runs the real torch_npu and torchair on a fake CANN (tests/fakes/cann), in .venv/ascend: see test.sh."""

import dataclasses
from collections.abc import Iterator

import pytest

# Loaded before any test module uses torch.npu.
import torch
import torch_npu  # noqa: F401  (registers the npu device)
from torch import Tensor
from torch._guards import detect_fake_mode

from executor.config.case import Case
from executor.engine import batching, weight_formats
from models.build import Formats
from ops.ascend import layout
from ops.format import FORMATS, Format
from ops.interface import Numbers, tensor_of
from tests.ascend.log import violations


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

    def made(numbers: Numbers) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64) if detect_fake_mode() else tensor_of(numbers)

    monkeypatch.setattr(layout, "tensor_of", made)
    monkeypatch.setattr(batching, "tensor_of", made)


@pytest.fixture
def int8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers and experts of every model are in int8, by rows in int8."""

    def formats(case: Case, *_: object) -> Formats:
        plain = FORMATS[case.model_config.dtype]
        return Formats(plain, Format("w8a8", 32), dataclasses.replace(plain, tiled=True))

    monkeypatch.setattr(weight_formats, "formats_of", formats)


@pytest.fixture
def private_formats() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False
