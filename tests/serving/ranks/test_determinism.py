"""A request's logits have the same bits alone and in company, whatever the others do: on one rank of the CPU."""

import random
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, equal

from tests.fakes.scripted import Server
from tests.families.deepseek_v3 import EXPANDED
from tests.quantised import mxfp4_tiny
from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case
from tests.variants import thorough_but
from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine

KINDS: dict[str, tuple[float, int, dict[str, Any]]] = {  # megabytes of an arena that is too small, fewest hits
    "float32": (0.25, 4, {}),
    "bfloat16": (0.125, 4, {"model_config": {"dtype": "bfloat16"}}),
    "q8": (0.25, 4, {"quantization": {"method": "q8", "group_size": 32}}),
    "q4": (0.25, 4, {"quantization": {"method": "q4", "group_size": 32}}),
    "mxfp4": (0.16, 1, {"model_name": "gpt_oss"}),
    "widths": (0.06, 1, {"model_name": "gemma4"}),
    "states": (0.6, 2, {"model_name": "qwen3_next", "serve_config": {"reserve": 0, "prefix_floor": 200}}),
    # Prompts behind a cached prefix may take another form than whole ones.
    "latents": (0.1, 0, {"model_name": "deepseek_v2", "serve_config": {"reserve": 0, "prefix_cache": False}}),
    "absorbed": (
        0.022,
        1,
        {
            "model_name": "deepseek_v3",
            "cache_config": {"page_size": 4, "kv_dtype": "int8"},
            "quantization": {"method": "q4", "group_size": 32},
        },
    ),
}


@pytest.mark.parametrize("kind", thorough_but(KINDS, "q4", "latents"))
def test_logits_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Prompts are cut into chunks, find prefixes of others, are preempted and computed again in a prefill; experts
    move; an answer's rows run in steps of one to four sequences."""
    seen: dict[tuple[int, int], Tensor] = {}  # (id, tokens before) -> logits
    choose = Engine.choose

    def watched(self: Engine, logits: Tensor, groups: ListOf[ListOf[Sequence]]) -> list[int]:
        for row, sequence in zip(logits, groups[0], strict=False):
            seen[sequence.id, len(sequence.ids)] = row.clone()
        return choose(self, logits, groups)

    monkeypatch.setattr(Engine, "choose", watched)
    arena_mb, hits, options = KINDS[kind]
    sizes = dict(num_hidden_layers=3, num_experts=16, num_key_value_heads=8, moe_intermediate_size=32)
    if kind == "mxfp4":
        del sizes["moe_intermediate_size"]
        save_tiny_of(tmp_path / "floats", "gpt_oss", **sizes, hidden_size=32, intermediate_size=32, head_dim=8)
        mxfp4_tiny(tmp_path / "floats", tmp_path / "model")
    elif kind == "states":
        save_tiny_of(tmp_path / "model", "qwen3_next", num_experts=16)
    elif kind == "widths":
        save_tiny_of(tmp_path / "model", "gemma4", num_experts=16)
    elif kind == "latents":
        save_tiny_of(tmp_path / "model", "deepseek_v2", **EXPANDED)
    elif kind == "absorbed":
        widths = dict(kv_lora_rank=16, intermediate_size=64, moe_intermediate_size=32)  # by which no prompt is expanded
        save_tiny_of(tmp_path / "model", "deepseek_v3", num_hidden_layers=4, n_routed_experts=16, **widths)
    else:
        save_tiny(tmp_path / "model", **sizes)
    case = tiny_case(
        tmp_path,
        tmp_path / "model",
        exe_mode="graph",
        threads=2,
        data_config={"input_max_len": 64, "max_new_tokens": 64, "batch_size": 4, "chunked_prefill_size": 16},
        offload_config={"mode": "elastic", "arena_mb": arena_mb, "max_swaps": 4, "measure_s": 0.01},
        **{"serve_config": {"reserve": 0, "prefix_floor": 16}} | options,
    )
    server, draw = Server(make_runner(case, tmp_path)), random.Random(5)
    worker, script = server.worker, server.script
    start = [draw.randrange(96) for _ in range(30)]
    asked: dict[int, tuple[list[int], int, dict[str, Any]]] = {}
    for id in range(14):
        ids = [
            *start[: draw.choice((13, 30, 30) if kind == "states" else (0, 13, 30))],
            *(draw.randrange(96) for _ in range(draw.randint(1, 25))),
        ]
        asked[id] = (ids, draw.randint(20, 60), {"temperature": draw.choice((0.0, 1.0)), "seed": id})
        server.submit(id, *asked[id][:2], **asked[id][2])
        for _ in range(draw.randrange(15)):
            worker.turn()
    server.finish()
    assert worker.preemptions > 1
    assert sum(script.rows(id)[0].cached_tokens > 0 for id in asked) >= hits
    for id, (ids, tokens, sampling) in asked.items():
        worker.loop.scheduler.caches[0].trim(0)
        assert server.answer(100 + id, ids, tokens, **sampling) == script.tokens(id)
        for length in range(len(ids), len(ids) + tokens):
            assert equal(seen[id, length], seen[100 + id, length]), (id, length - len(ids))
