"""tests/ascend is collected only by a Python that has torch_npu, and tests/ops/cuda/kernels by that of .venv/cuda
(see test.sh)."""

import gc
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from umbra.base.errors import collect_seldom
from umbra.text import tokenizer_record

collect_ignore = [] if find_spec("torch_npu") else ["ascend"]
collect_ignore += [] if Path(sys.prefix).name == "cuda" else ["ops/cuda/kernels"]
# Machines are busy: no test fails for the time it took. `bash test.sh thorough` tries more examples, others each time.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("umbra", **PATIENT, max_examples=20, derandomize=True)
settings.register_profile("thorough", **PATIENT, max_examples=400)
settings.load_profile("umbra")
collect_seldom()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what all tests import, which would be looked through again and again


@pytest.fixture(autouse=True, scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests' tokenizers do not replace those that this machine's user has read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_record, "RECORDS", tmp_path_factory.mktemp("tokenizers"))
        yield
