"""The CPU platform: what it refuses, and the settings that platforms have in common."""

import dataclasses
from typing import Any, cast

import pytest

from executor.config.load import load_case
from executor.launch.platform_settings import platform_settings
from executor.platform.ascend.compile_cache import CACHE
from executor.platform.base import graph_rows
from executor.platform.cpu import CpuPlatform
from ops.parallel.partitions import ParallelSizes
from tests.tiny import ONE_RANK
from umbra.errors import UserError

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


def test_the_settings_of_a_platform_are_those_of_its_case() -> None:
    case = load_case("demo", ["threads=3"])
    found = platform_settings(case)
    assert found.graphs is None
    kept = dataclasses.replace(case.model_config, enable_cache_compile=True)
    assert platform_settings(dataclasses.replace(case, model_config=kept)).graphs == CACHE
    assert (found.case, found.threads, found.shadow_threads) == ("demo", 3, None)
    assert (found.exe_mode, found.dtype, found.strict) == (case.exe_mode, case.model_config.dtype, case.strict)
    assert (found.sizes, found.decode_rows) == (case.parallel_sizes, case.decode_rows)
    assert "description" not in found.graph_facts
    assert "prompts" not in cast(dict[str, Any], found.graph_facts["data_config"])
    shadowed = platform_settings(load_case("demo", ["shadow_threads=2", "offload_config.timeout_s=7", *SHADOWS]))
    assert (shadowed.shadow_threads, shadowed.shadow_timeout_s) == (2, 7)
