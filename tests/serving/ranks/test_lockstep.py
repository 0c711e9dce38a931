"""Ranks serve random traffic in lockstep: they never differ, and every request gets the tokens that it gets alone
without drafts.

.venv/bin/python -m tests.serving.ranks.test_lockstep 10000      # the same for longer, with every request alone
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import save_tiny, write_case

pytestmark = [pytest.mark.slow, pytest.mark.beside]

SPLITS: dict[str, tuple[float, dict[str, int]]] = {  # kilobytes of a rank's arena: too few for experts and all pages
    "tp4": (60, {"moe_tp_size": 2}),
    "dp2_tp2": (60, {"attn_tp_size": 2, "moe_tp_size": 2}),
}


def test_traffic_on_four_ranks(tmp_path: Path) -> None:
    check_traffic(tmp_path, "dp2_tp2", 400, 20)


def check_traffic(folder: Path, split: str, steps: int, alone: int, limit_s: float = 300) -> None:
    """`alone` is the number of requests that run alone afterwards; 0: all."""
    arena, sizes = SPLITS[split]
    save_tiny(folder / "model", eos_token_id=None, num_key_value_heads=8)
    case = write_case(
        folder / "case.yaml",
        folder / "model",
        exe_mode="graph",
        world_size=4,
        parallel_config=sizes,
        data_config={
            "input_max_len": 40,
            "max_new_tokens": 16,
            "batch_size": 8,
            "chunked_prefill_size": 24,
            "draft_tokens": 3,
        },
        offload_config={"mode": "elastic", "arena_mb": arena / 1024, "max_swaps": 2, "measure_s": 0.05},
        serve_config={"reserve": 2, "prefix_floor": 16},
    )
    out = folder / "out.json"
    program = ["tests/serving/ranks/lockstep_ranks.py", str(case), str(steps), str(out), "--alone", str(alone)]
    done = run_ranks(folder, 4, program, limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["steps"] == steps
    assert not found["refused"]
    assert not any(found["held"])
    assert found["preemptions"] > 3
    assert found["moved"] > 1
    assert found["hits"] > 10
    assert found["drafted"] > 3
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
    print(
        f"{split}: {steps} steps, {found['submitted']} requests, {len(found['aborted'])} aborted, "
        f"{found['preemptions']} preemptions, {found['hits']} with a prefix, {found['moved']} comings and goings of "
        f"experts on rank 0, {found['accepted']} of {found['drafted']} drafted tokens accepted; {compared} whole "
        f"answers and {len(found['alone']) - compared} that were cut short are "
        "those of the requests alone"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        check_traffic(Path(temporary), "tp4", int(sys.argv[1]), int(sys.argv[2]), 24 * 3600)
