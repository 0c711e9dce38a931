"""The checker of soaks: a history without faults passes, and each fault that is planted in it is found."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.drift import change as change_of
from tests.serving.drift import slope
from tests.serving.history import Checker, read_history

SECONDS, EVERY_S, QUIET_S = 7200.0, 40.0, 240.0
Event = dict[str, Any]
History = list[Event]


def question(key: int) -> Event:
    texts = [f"answer number {key}"]
    return {"t": 0.1 * key, "what": "question", "key": key, "kind": "text", "choices": 1, "most": 9, "texts": texts,
            "ends": ["length"], "prompt": 5, "tokens": 9, "logprobs": f"hash{key}"}  # fmt: skip


def request(t: float, id: int, key: int, client: str, **end: Any) -> History:
    sent = {"t": t, "what": "send", "id": id, "client": client, "life": 0, "key": key, "api": "chat", "stream": True}
    own = {name: value for name, value in question(key).items() if name in ("texts", "ends", "prompt", "tokens")}
    good = {"how": "answered", "status": 200, "first": t + 0.1, "last": t + 0.2, "ids": [f"cmpl-{id}"], **own}
    return [sent, {"t": t + 1, "what": "end", "id": id, **(end or good)}]


def process(pid: int, name: str, mb: float) -> Event:
    return {"pid": pid, "name": name, "mb": mb, "threads": 7, "files": 13, "cpu": 1.0}


def yardsticks(t: float, of: str, pairs: int) -> History:
    return [
        {"t": t, "what": "yardstick", "kind": kind, "life": 0, "of": of, "prompt": 16, "tokens": tokens, "took": 0.1,
         "cpu": {"front": 0.02, "rank": 0.04 + 0.01 * math.sin(7 * number)}, "probe": 0.002, "probe_cpu": 0.002}
        for number in range(pairs) for kind, tokens in (("first token", 1), ("token", 64))
    ]  # fmt: skip


def made() -> History:
    """Two hours in which a rank is killed once; requests are answered, refused, and left by their clients."""
    events = [question(key) for key in range(5)]
    begin = 100.0
    events += [{"t": begin, "what": "start", "seconds": SECONDS}, {"t": begin, "what": "ready", "life": 0}]
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
            events += yardsticks(t + 4, "", 1)
            counted["length"] += 2
            counted["tokens"] += 65
            counted["prompt"] += 32
    end = begin + SECONDS
    events += [*yardsticks(end - 1, "old", 50), *yardsticks(end - 1, "new", 50)]
    events.append({"t": end, "what": "fault", "kind": "drain", "life": 0})
    events.append({"t": end + 1, "what": "exit", "life": 0, "status": 0, "left": 0, "files": [], "traceback": ""})
    return [*events, {"t": end + 2, "what": "over"}]


pytestmark = pytest.mark.thorough
WHOLE = made()


def found(history: History, **settings: Any) -> list[str]:
    return Checker(history, **settings).violations


def of(history: History, what: str, **facts: Any) -> Event:
    """The first event that has these `facts`."""
    return next(e for e in history if e["what"] == what and all(e.get(name) == value for name, value in facts.items()))


def after(history: History, what: str, share: float = 0.5) -> History:
    """The events of this kind after a share of the time."""
    return [event for event in history if event["what"] == what and event["t"] > 100 + share * SECONDS]


def test_a_history_without_faults() -> None:
    assert found(WHOLE) == []
    table = Checker(WHOLE).table()
    assert "| violations | 0 |" in table
    assert "| memory of front 10 | 29" in table


@pytest.mark.parametrize("at", [1500, -400])
def test_a_history_that_still_grows(tmp_path: Path, at: int) -> None:
    lines = [json.dumps(event) + "\n" for event in WHOLE][:at]
    (tmp_path / "history").write_text("".join(lines) + lines[-1][:20])
    history = list(read_history(tmp_path / "history"))
    assert len(history) == len(lines)
    assert found(history) == []
    lost = of(history, "end", id=1)
    assert any("request 1 was never answered" in line for line in found([e for e in history if e is not lost]))


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


def slower(history: History) -> None:
    for yardstick in history:
        if yardstick["what"] == "yardstick" and yardstick["kind"] == "token" and yardstick["of"] == "old":
            yardstick["cpu"]["rank"] *= 1.3


MIXED = ["answer numbanswer number 2er 1"]
TIMES: dict[str, Callable[[History], object]] = {  # a violation, and a fault that is planted
    "token: CPU of front and rank, ms: the median differs from that of a new server by +2": slower,
    "/health/ready told of a kill after 3.0 s": lambda h: change(h, "mended", told=3.0),
    "for 8.0 s /health was not answered within 1 s": lambda h: after(h, "health")[5].update(seconds=8.0),
}
FAULTS: dict[str, Callable[[History], object]] = TIMES | {
    "request 6 was never answered": lambda h: h.remove(of(h, "end", id=6)),
    "request 6: its answer is that of question 2, and": lambda h: change(h, "end", 6, texts=["answer number 2"]),
    f"request 6: {MIXED}, and alone ['answer number 1']": lambda h: change(h, "end", 6, texts=MIXED),
    "request 20006: a part of an answer that is not": lambda h: change(h, "end", 20_006, texts=["answer number 2"]),
    "request 6 was answered 2 times": lambda h: h.append(dict(of(h, "end", id=6))),
    "request 6 was answered, but never sent": lambda h: h.remove(of(h, "send", id=6)),
    "bear the same id cmpl-7": lambda h: change(h, "end", 6, ids=["cmpl-7"]),
    "request 6 ended by ['stop'], and alone ['length']": lambda h: change(h, "end", 6, ends=["stop"]),
    "request 6: tokens 8, alone 9": lambda h: change(h, "end", 6, tokens=8),
    "request 6: logprobs hash, alone hash1": lambda h: change(h, "end", 6, logprobs="hash"),
    "request 6: no end": lambda h: change(h, "end", 6, faults=["no end"]),
    "request 6: IncompleteReadError": lambda h: change(h, "end", 6, how="cut", why="IncompleteReadError", status=None),
    "request 100 ended with 500 engine_gone": lambda h: change(h, "end", 100, status=500, error="engine_gone"),
    "request 6 ended with 200": lambda h: change(h, "send", 6, client="wrong", wanted=400),
    "2 frames are held, first 1": lambda h: count(h, 0.9, {"arena_frames:sequences": 1, "arena_frames:free": -1}),
    "there are 203 frames, first 204": lambda h: count(h, 0.5, {"arena_frames:free": -1}),
    "num_requests_running is 1.0": lambda h: count(h, 0.5, {"num_requests_running": 1.0}),
    "front 10: files may grow by 4": lambda h: grow(h, "quiet", 0, "files", lambda t: t // 900),
    # Of a process that is not seen for long enough to have a slope.
    "rank 11 has 12 more files": lambda h: grow(h, "quiet", 1, "files", lambda t: int(t // 40) * (t < 1000)),
    "front 10: threads may grow by 2": lambda h: grow(h, "quiet", 0, "threads", lambda t: t // 1800),
    "front 10: mb may grow by ": lambda h: grow(h, "look", 0, "mb", lambda t: 8 * t / 3600),  # below a noise of 3 MB
    "counts 5 ended by length, its clients 6 to 12": lambda h: count(h, 0.0, {"request_success_total:length": -1}),
    "counts 10060 prompt tokens, its clients 30 to 60": lambda h: count(h, 0.0, {"prompt_tokens_total": 10_000}),
    "counts 1 refused, its clients 2": lambda h: count(h, 0.0, {"admission_rejections_total:queue_full": -1}),
    "did not tell of a kill, or did not come back": lambda h: change(h, "mended", took=None),
    "server 0 ended with status 1": lambda h: change(h, "exit", status=1),
    "server 0 left 1 processes": lambda h: change(h, "exit", left=1),
    "server 0 wrote a traceback": lambda h: change(h, "exit", traceback="Traceback"),
    "servers [0] have not ended": lambda h: h.remove(of(h, "exit")),
    "nothing happened of num_preemptions_total": lambda h: count(h, 0.0, {"num_preemptions_total": -5.0}),
}


@pytest.mark.parametrize("violation", FAULTS)
def test_a_planted_fault(violation: str) -> None:
    history = copy.deepcopy(WHOLE)
    FAULTS[violation](history)
    violations = found(history)
    assert any(violation in line for line in violations), violations[:3]
    assert violation not in TIMES or found(history, times=False) == []


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


def test_changes_of_percentiles() -> None:
    hundred = [float(number) for number in range(1, 101)]  # ranks 40 to 59 of the median, 98 and 99 of the last percent
    for new, share, grown, error in (
        (hundred, 0.5, 0.0, 2**0.5 * 9.5 / 51), (hundred, 0.99, 0.0, 2**0.5 * 1.0 / 100),
        ([3 * number for number in hundred], 0.5, 2.0, 3 * 2**0.5 * 9.5 / 51),
    ):  # fmt: skip
        assert change_of(hundred, new, share) == pytest.approx((grown, error))
    assert change_of(hundred * 100, hundred * 100, 0.5)[1] < 0.02  # ten times as exact
