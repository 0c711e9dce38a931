"""Ranks serve random traffic in lockstep: they never differ, and every request gets the tokens that it gets alone."""

import json
from pathlib import Path

import pytest

from tests.executor.job.test_offload_ranks import run_job
from tests.tiny import save_tiny, write_case

pytestmark = pytest.mark.slow

SPLITS: dict[str, tuple[float, dict[str, int]]] = {  # kilobytes of a rank's arena: too few for experts and all pages
    "tp4": (45, {"moe_tp_size": 2}),
    "dp2_tp2": (60, {"attn_tp_size": 2, "moe_tp_size": 2}),
}


@pytest.mark.parametrize("split", SPLITS)
def test_traffic_on_four_ranks(tmp_path: Path, split: str) -> None:
    arena, sizes = SPLITS[split]
    save_tiny(tmp_path / "model", eos_token_id=None, num_key_value_heads=8)
    case = write_case(
        tmp_path / "case.yaml",
        tmp_path / "model",
        exe_mode="graph",
        world_size=4,
        parallel_config=sizes,
        data_config={"input_max_len": 40, "max_new_tokens": 16, "batch_size": 8, "chunked_prefill_size": 24},
        offload_config={"mode": "elastic", "arena_mb": arena / 1024, "measure_s": 0.05},
        serve_config={"reserve": 2, "prefix_floor": 16},
    )
    out = tmp_path / "out.json"
    done = run_job(case, ["tests/serving/lockstep_ranks.py", str(case), "700", str(out)], 4)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    print({key: value for key, value in found.items() if key not in ("rows", "alone", "ended")}, len(found["ended"]))
    assert not found["refused"]
    assert not any(found["held"])
    assert found["preemptions"] > 3
    assert found["moved"] > 100
    assert found["hits"] > 10
    ended = set(found["ended"])
    assert len(ended) > found["submitted"] // 2
    compared = 0
    for id, tokens in found["alone"]:
        got = found["rows"].get(str(id), [])
        assert got == tokens[: len(got)]
        if id in ended:
            assert got == tokens
            compared += 1
    assert compared > 15
