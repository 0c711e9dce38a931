"""The soak in its short form: three minutes of few requests, servers that start, lose a rank and end. And its checker:
a history without faults passes, each fault that is planted in it is found, and so is what is not well-formed."""

import asyncio
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import answers
from tests.serving.answers import PATHS
from tests.serving.api.front import serving
from tests.serving.history import Checker, Event, slope
from tests.serving.soak import History as Log
from tests.serving.soak import Soak

pytestmark = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.beside
def test_soak(tmp_path: Path) -> None:
    log = Log(tmp_path / "history")
    Soak(log, tmp_path, seconds=180, rate=4).run()  # about 35 seconds of CPU, of which half are starts of processes
    checker = Checker(log.events())
    print(checker.table())
    assert checker.violations == []


SECONDS, EVERY_S, QUIET_S = 7200.0, 40.0, 240.0
History = list[Event]


def question(key: int) -> Event:
    texts = [f"answer number {key}"]
    return {
        "t": 0.1 * key,
        "what": "question",
        "key": key,
        "kind": "text",
        "choices": 1,
        "most": 9,
        "texts": texts,
        "ends": ["length"],
        "prompt": 5,
        "tokens": 9,
        "logprobs": f"hash{key}",
    }


def request(t: float, id: int, key: int, client: str, **end: Any) -> History:
    sent = {"t": t, "what": "send", "id": id, "client": client, "life": 0, "key": key, "api": "chat", "stream": True}
    own = {name: value for name, value in question(key).items() if name in ("texts", "ends", "prompt", "tokens")}
    good = {"how": "answered", "status": 200, "first": t + 0.1, "last": t + 0.2, "ids": [f"cmpl-{id}"], **own}
    return [sent, {"t": t + 1, "what": "end", "id": id, **(end or good)}]


def process(pid: int, name: str, mb: float) -> Event:
    return {"pid": pid, "name": name, "mb": mb, "threads": 7, "files": 13, "cpu": 1.0}


def whole_history() -> History:
    """Two hours in which a rank is killed once; requests are answered, refused, and left by their clients."""
    events = [question(key) for key in range(5)]
    begin = 100.0
    events += [{"t": begin, "what": "start"}, {"t": begin, "what": "ready", "life": 0}]
    counted = {"stop": 0.0, "length": 0.0, "abort": 0.0, "error": 0.0, "prompt": 0.0, "tokens": 0.0, "refused": 0.0}
    killed, rank, starts = False, 11, 1
    for step in range(int(SECONDS / EVERY_S)):
        t = begin + EVERY_S * step + 1
        if not killed and t > begin + 1000:
            killed, rank, starts = True, 12, 2
            events += [{"t": t, "what": "fault", "kind": "kill", "life": 0}]
            events += request(t + 1, 10_000, 0, "whole", how="answered", status=503, error="loading")
            events += [{"t": t + 8, "what": "mended", "kind": "kill", "told": 0.1, "took": 8.0}]
        else:
            events += request(t, step, step % 5, "whole")
            events += request(t, 20_000 + step, 1, "vanishes", how="vanished", status=200, texts=["answ"], ends=[])
            counted["abort"] += 1
            counted["length"] += 1
            counted["tokens"] += 12
            counted["prompt"] += 10
            if step % 7 == 0:
                events += request(t, 30_000 + step, 2, "slow", how="answered", status=429, error="queue_full")
                counted["refused"] += 1
        noise = math.sin(12.9898 * step) * 3
        processes = [process(10, "front", 300 + noise), process(rank, "rank", 400 - noise)]
        events.append({"t": t + 2, "what": "look", "life": 0, "processes": processes})
        events.append({"t": t + 2, "what": "health", "seconds": 0.01})
        if (step + 1) % int(QUIET_S / EVERY_S) == 0:
            metrics = {f"request_success_total:{reason}": counted[reason] for reason in ("stop", "abort", "error")}
            metrics |= {"request_success_total:length": counted["length"], "engine_starts_total": starts}
            metrics |= {"generation_tokens_total": counted["tokens"], "prompt_tokens_total": counted["prompt"]}
            metrics |= {"e2e_request_latency_seconds_count": counted["length"], "kv_cache_usage_perc": 0.0}
            metrics |= {"admission_rejections_total:queue_full": counted["refused"]}
            metrics |= {"admission_rejections_total:too_slow": 0.0, "num_requests_running": 0.0}
            metrics |= {"arena_frames:sequences": 1.0, "arena_frames:experts": 132.0, "arena_frames:free": 71.0}
            metrics |= {"num_requests_waiting": 0.0, "prefix_cache_hits_total": 5.0, "expert_misses_total": 5.0}
            metrics |= {"num_preemptions_total": 5.0, "spec_decode_num_accepted_tokens_total": 5.0}
            events.append({"t": t + 3, "what": "quiet", "life": 0, "metrics": metrics, "processes": processes})
    end = begin + SECONDS
    events.append({"t": end - 1, "what": "compared", "old": 10.0, "new": 9.5})
    events.append({"t": end, "what": "fault", "kind": "drain", "life": 0})
    events.append({"t": end + 1, "what": "exit", "life": 0, "status": 0, "left": 0, "files": [], "traceback": ""})
    return [*events, {"t": end + 2, "what": "over"}]


WHOLE = whole_history()


def of(history: History, what: str, **facts: Any) -> Event:
    """The first event that has these `facts`."""
    return next(e for e in history if e["what"] == what and all(e.get(name) == value for name, value in facts.items()))


def after(history: History, what: str, share: float = 0.5) -> History:
    """The events of this kind after a share of the time."""
    return [event for event in history if event["what"] == what and event["t"] > 100 + share * SECONDS]


def test_a_history_without_faults() -> None:
    checker = Checker(WHOLE)
    assert checker.violations == []
    assert "| violations | 0 |" in checker.table()


def change(history: History, what: str, id: int | None = None, **facts: Any) -> None:
    """Sets `facts` of the first event of this kind, of a request if there is an `id`."""
    of(history, what, **({} if id is None else {"id": id})).update(facts)


def count(history: History, share: float, changes: dict[str, float]) -> None:
    """Adds to what the server counted in quiet times, after a share of the time."""
    for quiet in after(history, "quiet", share):
        for name, by in changes.items():
            quiet["metrics"][name] += by


def grow(history: History, what: str, process: int, name: str, by: Callable[[float], float]) -> None:
    for event in after(history, what, 0.0):
        event["processes"][process][name] += by(event["t"])


MIXED = ["answer numbanswer number 2er 1"]
FAULTS: dict[str, Callable[[History], object]] = {  # a violation, and a fault that is planted
    "CPU time differs from that of a new server by +20": lambda h: change(h, "compared", new=10.0, old=12.0),
    "/health/ready told of a kill after 3.0 s": lambda h: change(h, "mended", told=3.0),
    "for 8.0 s /health was not answered within 1 s": lambda h: after(h, "health")[5].update(seconds=8.0),
    "request 6 was never answered": lambda h: h.remove(of(h, "end", id=6)),
    "request 6: its answer is that of question 2, and": lambda h: change(h, "end", 6, texts=["answer number 2"]),
    f"request 6: {MIXED}, and alone ['answer number 1']": lambda h: change(h, "end", 6, texts=MIXED),
    "request 20006: a part of an answer that is not": lambda h: change(h, "end", 20_006, texts=["answer number 2"]),
    "request 6 was answered 2 times": lambda h: h.append(dict(of(h, "end", id=6))),
    "bear the same id cmpl-7": lambda h: change(h, "end", 6, ids=["cmpl-7"]),
    "request 6 ended by ['stop'], and alone ['length']": lambda h: change(h, "end", 6, ends=["stop"]),
    "request 6: IncompleteReadError": lambda h: change(h, "end", 6, how="cut", why="IncompleteReadError", status=None),
    "request 100 ended with 500 engine_gone": lambda h: change(h, "end", 100, status=500, error="engine_gone"),
    "request 6 ended with 200": lambda h: change(h, "send", 6, client="wrong", wanted=400),
    "front 10: files may grow by 4": lambda h: grow(h, "quiet", 0, "files", lambda t: t // 900),
    "front 10: mb may grow by ": lambda h: grow(h, "look", 0, "mb", lambda t: 8 * t / 3600),  # below a noise of 3 MB
    "counts 5 ended by length, its clients 6 to 12": lambda h: count(h, 0.0, {"request_success_total:length": -1}),
    "counts 1 refused, its clients 2": lambda h: count(h, 0.0, {"admission_rejections_total:queue_full": -1}),
    "did not tell of a kill, or did not come back": lambda h: change(h, "mended", took=None),
    "servers [0] have not ended": lambda h: h.remove(of(h, "exit")),
    "nothing happened of num_preemptions_total": lambda h: count(h, 0.0, {"num_preemptions_total": -5.0}),
}


@pytest.mark.parametrize("violation", FAULTS)
def test_a_planted_fault(violation: str) -> None:
    history = copy.deepcopy(WHOLE)
    FAULTS[violation](history)
    violations = Checker(history).violations
    assert any(violation in line for line in violations), violations[:3]


def test_slopes() -> None:
    """The error covers the noise, and the beginning does not count."""
    times = [10.0 * i for i in range(720)]
    flat = slope([(t, 100 + math.sin(5 * t)) for t in times])
    assert flat
    assert abs(flat.hourly) < flat.error < 0.5
    growing = slope([(t, 50.0 if t < 1000 else 100 + 4 * t / 3600 + math.sin(5 * t)) for t in times])
    assert growing
    assert abs(growing.hourly - 4) < growing.error < 0.5
    assert slope([(t, 1.0) for t in times[:12]]) is None


BODIES: dict[str, dict[str, Any]] = {"completions": {"prompt": "Hi", "logprobs": 1, "n": 2, "seed": 1}}
BODIES |= {"chat": {"messages": [{"role": "user", "content": "Hi"}]}, "responses": {"input": "Hi", "store": False}}
BODIES |= {"messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}}


@pytest.mark.parametrize("api", BODIES)
def test_answers_are_read(api: str) -> None:
    """A stream and the whole answer agree. To a client that leaves, a part of it is well-formed; else only all is. What
    is lost or comes twice is a fault."""

    async def run() -> tuple[bytes, bytes]:
        async with serving("Hello!") as server:
            body = BODIES[api]
            streamed = await server.ask(PATHS[api], body | {"stream": True})
            return streamed.body, (await server.ask(PATHS[api], body)).body

    data, body = asyncio.run(run())
    stream, whole = answers.streamed(api, data, False), answers.whole(api, json.loads(body))
    assert stream.faults == whole.faults == []
    assert stream.texts == whole.texts == dict.fromkeys(range(BODIES[api].get("n", 1)), "Hello!")
    assert (stream.ends, stream.logprobs) == (whole.ends, whole.logprobs)
    assert len(stream.ids) == len(whole.ids) == 1
    for end in range(0, len(data), 7):
        seen = answers.streamed(api, data[:end], True)
        assert seen.faults == []
        assert all("Hello!".startswith(text) for text in seen.texts.values())
        assert answers.streamed(api, data[:end], False).faults
    blocks = data.split(b"\n\n")
    for index in range(len(blocks) - 1):
        for kept in (blocks[index : index + 1] * 2, []):
            spoilt = b"\n\n".join([*blocks[:index], *kept, *blocks[index + 1 :]])
            read = answers.streamed(api, spoilt, False)
            assert read.faults or read.texts != stream.texts, spoilt
