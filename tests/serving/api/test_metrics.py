"""The metrics of a server: what they count, and the board that shows them."""

import asyncio
import json
import re

import msgspec

from tests.fakes.clock import Clock
from tests.serving.api.front import Reply, Server, family_tokenizer, run, until
from umbra.base.files import ROOT
from umbra.serving.api import metrics as module
from umbra.serving.api.metrics import Metrics, memory
from umbra.serving.ranks.messages import GroupPages, Ready, Row, Running, State, Submit

STATE = State(
    step=9,
    waiting=2,
    running=[Running(5, 40, 60, 20, 140, 0)],
    groups=[GroupPages(10, 2, 30, 2, 3)],
    preemptions=1,
    drafted=8,
    accepted=5,
    step_tokens=[1, 40, 1],
    experts_resident=7,
    experts=16,
    expert_hits=90,
    expert_misses=10,
    arena_frames=100,
    expert_frames=48,
    free_frames=4,
    set_frames=2,
    shadow_exposed_s=0.5,
)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"umbra:{name}", {"model_name": "m", **labels})


def served(metrics: Metrics, clock: Clock) -> None:
    """A request with two tokens that waits for 1 s, is computed for 2 s, and decodes for 4 s."""

    async def request() -> None:
        async with metrics.arrived(40) as timeline:
            clock.now += 3
            timeline.row(Row(1, [7], cached_tokens=16, queued_s=1.0))
            clock.now += 4
            timeline.row(Row(1, [8], "length"))

    asyncio.run(request())


def test_a_request_is_counted_and_timed() -> None:
    metrics = Metrics("m", clock := Clock())
    served(metrics, clock)
    for name, sum_ in {
        "request_queue_time": 1,
        "request_prefill_time": 2,
        "time_to_first_token": 3,
        "request_decode_time": 4,
        "inter_token_latency": 4,
        "request_time_per_output_token": 4,
        "request_inference_time": 6,
        "e2e_request_latency": 7,
    }.items():
        assert value(metrics, f"{name}_seconds_sum") == sum_, name
        assert value(metrics, f"{name}_seconds_count") == 1
    assert value(metrics, "prompt_tokens_total") == value(metrics, "prefix_cache_queries_total") == 40
    assert value(metrics, "prefix_cache_hits_total") == 16
    assert value(metrics, "generation_tokens_total") == value(metrics, "request_generation_tokens_sum") == 2
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert metrics.first_token.percentiles(0.5) == [3.0]


def test_the_state_of_the_engine() -> None:
    metrics = Metrics("m")
    metrics.take(Ready(416, 4, 96, 16, 50, 2, [0], 100.0))
    metrics.take(STATE)
    for name, wanted in {
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.1,
        "num_preemptions_total": 1,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 5,
        "iteration_tokens_total_sum": 42,
        "expert_hits_total": 90,
        "expert_misses_total": 10,
        "experts": 16,
        "experts_resident": 7,
        "engine_starts_total": 1,
        "shadow_exposed_seconds_total": 0.5,
    }.items():
        assert value(metrics, name) == wanted, name
    assert value(metrics, "iteration_tokens_total_bucket", le="1.0") == 2
    assert [value(metrics, "arena_frames", tenant=tenant) for tenant in module.TENANTS] == [14, 24, 10, 48, 4]
    assert sum(memory(STATE).values()) == STATE.arena_frames


def test_a_sample_a_second_for_the_page() -> None:
    """With the rate since the one before; what waits or runs has the time at which it was first seen."""
    metrics = Metrics("m", clock := Clock())
    metrics.take(Ready(416, 4, 96, 16, 50, 2, [0], 100.0))
    state = msgspec.structs.replace(STATE, queue=[Running(6, 4, 0, 0, 9, 0)])
    for seconds, tokens in ((0.5, 3), (0.5, 5), (0.5, 0), (1.5, 30)):
        clock.now += seconds
        metrics.tokens += tokens
        metrics.take(state)
        state = msgspec.structs.replace(state, running=[*state.running, Running(tokens + 7, 4, 0, 0, 9, 0)])
    assert [(s.at, s.rate, s.hits, s.misses) for s in metrics.past] == [(1001.0, 8.0, 90, 10), (1003.0, 15.0, 90, 10)]
    assert metrics.past[0].memory == memory(STATE)
    assert metrics.since == {5: 1000.5, 6: 1000.5, 10: 1001.0, 12: 1001.5, 7: 1003.0}


def test_the_board_asks_for_what_there_is() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    lines = Metrics("m").text({}).decode().splitlines()
    exported = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"umbra:\w+", query)}
    assert asked <= exported, asked - exported
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert bases == shown, "a metric that the board does not show"
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(places)


def test_metrics_of_requests_over_http() -> None:
    hello, letter = (family_tokenizer("qwen3").encode(text, chat=False) for text in ("Hello", "a"))

    def answer(submit: Submit) -> list[int]:
        return letter * 1000 if submit.sampling.max_tokens == 1000 else hello

    async def scenario(server: Server) -> Reply:
        long = {"prompt": "Hi", "max_tokens": 1000}
        assert (await server.chat()).status == 200
        assert (await server.chat(stop="llo")).json["choices"][0]["message"]["content"] == "He"
        connections = [await server.open("/v1/completions", long) for _ in range(2)]
        await until(lambda: server.front.limits.open == 2)
        refused = await server.complete(**long)
        assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "queue_full", "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        for connection in connections:
            connection.kill()
        await until(lambda: server.front.limits.open == 0)
        return await server.get("/metrics")

    reply = run(scenario, answer, engine={"batch_size": 1, "step_s": 0.005}, max_queue=1)
    assert reply.headers["content-type"].startswith("text/plain; version=")
    lines = reply.body.decode().splitlines()
    for labels, count in {
        'admission_rejections_total{model_name="demo_chat",reason="queue_full"}': 1,
        'request_success_total{finished_reason="stop",model_name="demo_chat"}': 2,
        'request_success_total{finished_reason="abort",model_name="demo_chat"}': 2,
        'request_success_total{finished_reason="error",model_name="demo_chat"}': 0,
        'engine_starts_total{model_name="demo_chat"}': 1,
    }.items():
        assert f"umbra:{labels} {count:.1f}" in lines
