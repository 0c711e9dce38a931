"""Calls to the device fail, one in each process, from the load of a model to the end of its answers: what the user then
reads is one line that names the device's error."""

from pathlib import Path

import pytest

from tests.ascend.engine import ascend_case, ascend_runner, generate
from tests.ascend.log import device_calls, fail_call
from tests.ascend.ranks import run_ranks
from umbra.base.errors import UserError, refusal

# The last two are all that torch_npu says where its queue met the error: of a kernel its name, of a copy its sizes.
NAMED = (
    "error code is 507000",
    "error code:507000",
    "error 507000",
    "memory",
    "the current working operator name is",
    "the current copy params are",
)
PARTS = 8


def failed(rank: int, folder: Path, nth: int) -> tuple[int, str]:
    """(calls of the run, the line) where the call of this number fails; 0: none."""
    case = ascend_case(folder, "exe_mode=acl_graph", "offload_config.mode=elastic", "offload_config.arena_mb=1")
    fail_call(nth)
    try:
        generate(ascend_runner(case, folder))
    except UserError as error:
        return device_calls(), str(error)
    except Exception as error:
        return device_calls(), refusal(error) or repr(error)
    return device_calls(), ""


@pytest.mark.thorough
def test_a_call_that_fails_is_one_line(tmp_path: Path) -> None:
    ascend_case(tmp_path)
    ((calls, line),) = run_ranks(failed, 1, tmp_path, 0)
    assert (calls > 100, line) == (True, "")
    lines = [run_ranks(failed, 1, tmp_path, nth)[0][1] for nth in range(1, calls, calls // PARTS)]
    assert any(lines)  # others may fail without an effect
    assert all(any(word in line for word in NAMED) for line in lines if line), lines
