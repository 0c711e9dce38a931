"""The CPU platform: what it refuses, and the settings that platforms have in common."""

import dataclasses

import pytest

from tests.tiny import ONE_RANK
from umbra.base.errors import UserError
from umbra.executor.config.load import load_case
from umbra.executor.plan.platform_settings import platform_settings
from umbra.executor.platform.base import graph_rows
from umbra.executor.platform.cpu.device import CpuPlatform
from umbra.ops.parallel.partitions import ParallelSizes

SHADOWS = ("exe_mode=graph", "offload_config.mode=resident")


@pytest.mark.parametrize(
    ("key", "overrides"), [("threads", ()), ("shadow_threads", SHADOWS)], ids=["threads", "shadow_threads"]
)
def test_absurd_numbers_of_threads_are_refused(
    key: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5})
    case = load_case("demo", [f"{key}=1000", *overrides])
    with pytest.raises(UserError, match=f"^case demo: {key}: 1000 are more than 16 for each of the 3 CPUs that this"):
        CpuPlatform(platform_settings(case), ONE_RANK)


def test_rows_of_a_decode_graph_are_powers_of_two_up_to_a_whole_batch() -> None:
    assert [graph_rows(rows, 6) for rows in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    assert [graph_rows(rows, 64) for rows in (1, 8, 9, 33, 64)] == [1, 8, 16, 64, 64]
    settings = platform_settings(load_case("demo", []))
    for world, attn_tp, rows in ((8, 2, 3), (4, 4, 12)):
        sized = dataclasses.replace(settings, decode_rows=12, sizes=ParallelSizes(world, attn_tp))
        assert sized.group_rows == rows
