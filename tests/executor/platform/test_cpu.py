"""The CPU platform refuses what this machine cannot run."""

import pytest

from errors import UserError
from executor.config.load import load_case
from executor.engine.settings import platform_settings
from executor.platform.cpu import CpuPlatform
from tests.tiny import ONE_RANK

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
