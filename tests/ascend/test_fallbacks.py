"""If something runs in another way than the case says, a warning names the op; in a strict case it is an error."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ascend.engine import ascend_case, ascend_runner, generate
from tests.ascend.ge import ge_programs
from umbra.base.errors import UserError
from umbra.executor.platform.ascend.fallbacks import loud_fallbacks
from umbra.ops.ascend.ops import AscendOps


@contextlib.contextmanager
def op_without_converter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch.library._scoped_library("strange", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x + x, "PrivateUse1")
        library.impl("doubled", torch.empty_like, "Meta")
        real = AscendOps.linear
        monkeypatch.setattr(AscendOps, "linear", lambda *args: real(*args) + torch.ops.strange.doubled(args[1])[:, :1])
        yield


@pytest.mark.thorough
def test_an_op_without_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    with op_without_converter(monkeypatch), ge_programs() as programs:
        runner = ascend_runner(ascend_case(tmp_path, "exe_mode=ge_graph"), tmp_path)
        assert [len(s.generated) for s in generate(runner)] == [6, 6, 6]
        warning = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING"))
        assert "decode runs op by op in place of ge_graph" in warning
        assert "strange.doubled" in warning
        strict = ascend_runner(ascend_case(tmp_path, "exe_mode=ge_graph", "strict=true"), tmp_path)
        with pytest.raises(UserError, match=r"strict: true: decode runs op by op.*strange\.doubled"):
            generate(strict)
    assert not programs


def test_what_torchair_warns_of(capsys: pytest.CaptureFixture[str]) -> None:
    said = "The static_capture_size_limit reached 64, we will fall back to eager for all subsequent executions."
    with warnings.catch_warnings(record=True) as shown:
        with loud_fallbacks(strict=False):
            warnings.warn(said, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        with pytest.raises(UserError, match="strict: true: The static_capture_size_limit"), loud_fallbacks(strict=True):
            warnings.warn(said, stacklevel=1)
        warnings.warn(said, stacklevel=1)  # nothing watches any more
    assert capsys.readouterr().out == f"WARNING: {said} (strict: true makes this an error)\n"
    assert [str(warning.message) for warning in shown] == ["something else", said]
