"""A case that does not fit into this machine's memory, or into that of a cgroup, is refused in one line before any of
it is allocated."""

import os
import re
from pathlib import Path

import pytest

from tests.tiny import save_tiny, tiny_case
from umbra.base.errors import UserError
from umbra.executor.config.load import load_case
from umbra.executor.config.units import GB
from umbra.executor.plan.host_memory import check_host_memory, memory_limit, too_much_here
from umbra.executor.plan.sketch import sketch_of


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_a_cgroup_and_those_above_it_counts(tmp_path: Path, version: int) -> None:
    name, top = ("memory.max", tmp_path) if version == 2 else ("memory.limit_in_bytes", tmp_path / "memory")
    lines = {2: "0::/a/b\n", 1: "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/a/b\n0::/\n"}
    own = write(tmp_path / "own", lines[version])
    assert memory_limit(tmp_path, own)[1] == "this machine's memory"
    write(top / "a" / "b" / name, "max\n" if version == 2 else "9223372036854771712\n")
    write(top / "a" / name, "1000000\n")
    assert memory_limit(tmp_path, own) == (1000000, str(top / "a" / name))
    write(top / "a" / "b" / name, "500000\n")
    assert memory_limit(tmp_path, own) == (500000, str(top / "a" / "b" / name))
    write(top / name, "70000\n")  # all that a container sees, whose cgroup has its name outside
    own.write_text(lines[version].replace("/a/b", "/unknown/outside"))
    assert memory_limit(tmp_path, own) == (70000, str(top / name))


def test_a_case_that_does_not_fit_is_refused_with_its_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    case = tiny_case(tmp_path, tmp_path / "model")
    check_host_memory(case, 1, sketch_of(case))
    many = 1_000_000
    with pytest.raises(
        UserError, match=rf"on each of {many} rank\(s\) do not fit into the .* GB of .*: this model nee"
    ):
        check_host_memory(case, many, sketch_of(case))
    arena = tiny_case(tmp_path, tmp_path / "model", offload_config={"mode": "elastic", "arena_mb": 100})
    with pytest.raises(UserError, match=r"0\.10 GB of KV cache"):  # the arena, which is allocated whole
        check_host_memory(arena, many, sketch_of(arena))


def test_experts_of_all_ranks_and_their_page_tables_must_fit() -> None:
    room = memory_limit()[0]
    assert too_much_here(room // 3, 2) is None
    assert re.match(r"[\d.]+ GB of experts on the host do not fit", too_much_here(room // 2, 2) or "")


@pytest.mark.parametrize(
    ("gigabytes", "overrides", "keys"),
    [
        (39.6, ["quantization.method=none"], ["quantization.method", "quantization.method"]),
        (18.6, ["max_model_len=40000", "batch_size=4"], ["max_model_len", "max_model_len"]),
        (18.6, ["max_model_len=40000"], ["max_model_len", "cache_config.kv_dtype"]),
        (9.6, [], []),
    ],
)
def test_what_a_refusal_names_makes_it_fit(
    monkeypatch: pytest.MonkeyPatch, gigabytes: float, overrides: list[str], keys: list[str]
) -> None:

    def limit() -> tuple[int, str]:
        program = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # which counts too
        return int(gigabytes * GB) + program, "this machine's memory"

    monkeypatch.setattr("umbra.executor.plan.host_memory.memory_limit", limit)
    case = load_case("qwen3_30b_a3b_q4_cpu", overrides)
    with pytest.raises(UserError, match=r"GB of this machine's memory: ") as refused:
        check_host_memory(case, 1, sketch_of(case))
    remedies = re.findall(r"set ([\w.]+): (\w+)(?: with (batch_size): (\d+))?", str(refused.value))
    assert [key for key, *_ in remedies] == keys
    for key, value, *more in remedies:
        changed = [f"{key}={value}", *(["=".join(more)] if more[0] else [])]
        better = load_case("qwen3_30b_a3b_q4_cpu", [*overrides, *changed])
        check_host_memory(better, 1, sketch_of(better))
