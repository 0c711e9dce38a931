"""The line for what an NPU refuses."""

import pytest

from umbra.base.errors import REFUSALS
from umbra.base.errors import refusal as any_refusal
from umbra.executor.platform.ascend.errors import refusal


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 64.00 GiB total)"),
            "has no 20.00 MiB left",
        ),
        (
            RuntimeError(
                "operator():../x.cpp:26 NPU function error: aclrtMemcpy, error code is 507000\n"
                "[ERROR] (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed.\nEZ9999: x\ny"
            ),
            "the NPU failed: NPU function error: aclrtMemcpy, error code is 507000; EZ9999: x (",
        ),
        (
            RuntimeError(
                "layer 1, step 7: a copy of its experts: f():x.cpp:26 NPU function error: f, error code is 5\ny"
            ),
            "the NPU failed: layer 1, step 7: a copy of its experts: NPU function error: f, error code is 5 (",
        ),
    ],
)
def test_what_the_npu_refuses_is_one_line(error: RuntimeError, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(error)
    assert line in said
    assert "\n" not in said
    assert not any_refusal(error)  # by a process without the device
    monkeypatch.setitem(REFUSALS, "ascend", refusal)
    assert any_refusal(error) == said


def test_other_errors_are_bugs() -> None:
    assert not refusal(RuntimeError("boom"))
