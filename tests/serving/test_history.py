"""The checker of soaks: a history without faults passes, and each fault that is planted in it is found."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.drift import change, slope
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


def lost(history: History) -> None:
    history.remove(of(history, "end", id=6))


def swapped(history: History) -> None:
    one, other = of(history, "end", id=6), of(history, "end", id=7)
    one["texts"], other["texts"] = other["texts"], one["texts"]


def mixed(history: History) -> None:
    of(history, "end", id=6)["texts"] = ["answer numbanswer number 2er 1"]


def mixed_for_one_who_leaves(history: History) -> None:
    of(history, "end", id=20_006)["texts"] = ["answer number 2"]


def twice(history: History) -> None:
    history.append(dict(of(history, "end", id=6)))


def never_sent(history: History) -> None:
    history.remove(of(history, "send", id=6))


def one_id(history: History) -> None:
    of(history, "end", id=6)["ids"] = of(history, "end", id=7)["ids"]


def other_end(history: History) -> None:
    of(history, "end", id=6)["ends"] = ["stop"]


def miscounted(history: History) -> None:
    of(history, "end", id=6)["tokens"] = 8


def other_logprobs(history: History) -> None:
    of(history, "end", id=6)["logprobs"] = "hash"


def malformed(history: History) -> None:
    of(history, "end", id=6)["faults"] = ["a stream ends without [DONE]"]


def cut(history: History) -> None:
    of(history, "end", id=6).update(how="cut", why="IncompleteReadError", status=None)


def refused_for_nothing(history: History) -> None:
    end = of(history, "end", id=100)
    end.update(status=500, error="engine_gone")


def wrong_and_answered(history: History) -> None:
    of(history, "send", id=6).update(client="wrong", wanted=400)


def leak_of_pages(history: History) -> None:
    for quiet in after(history, "quiet", 0.9):
        quiet["metrics"]["arena_frames:sequences"] += 1
        quiet["metrics"]["arena_frames:free"] -= 1


def lost_frame(history: History) -> None:
    after(history, "quiet")[-1]["metrics"]["arena_frames:free"] -= 1


def held(history: History) -> None:
    after(history, "quiet")[0]["metrics"]["num_requests_running"] = 1.0


def leak_of_descriptors(history: History) -> None:
    """One in a quarter of an hour."""
    for quiet in after(history, "quiet", 0.0):
        quiet["processes"][0]["files"] += int(quiet["t"] // 900)


def burst_of_descriptors(history: History) -> None:
    """Of a process that is not seen for long enough to have a slope."""
    for quiet in after(history, "quiet", 0.0):
        if quiet["t"] < 1000:
            quiet["processes"][1]["files"] += int(quiet["t"] // 40)


def leak_of_threads(history: History) -> None:
    for quiet in after(history, "quiet", 0.0):
        quiet["processes"][0]["threads"] += int(quiet["t"] // 1800)


def leak_of_memory(history: History) -> None:
    """Of 8 MB an hour, below a noise of 3 MB."""
    for look in after(history, "look", 0.0):
        look["processes"][0]["mb"] += 8 * look["t"] / 3600


def slower(history: History) -> None:
    for yardstick in history:
        if yardstick["what"] == "yardstick" and yardstick["kind"] == "token" and yardstick["of"] == "old":
            yardstick["cpu"]["rank"] *= 1.3


def uncounted(history: History) -> None:
    for quiet in after(history, "quiet", 0.0):
        quiet["metrics"]["request_success_total:length"] -= 1


def counted_too_much(history: History) -> None:
    for quiet in after(history, "quiet", 0.0):
        quiet["metrics"]["prompt_tokens_total"] += 10_000


def not_refused(history: History) -> None:
    for quiet in after(history, "quiet", 0.0):
        quiet["metrics"]["admission_rejections_total:queue_full"] -= 1


def never_back(history: History) -> None:
    of(history, "mended")["took"] = None


def told_late(history: History) -> None:
    of(history, "mended")["told"] = 3.0


def dead_front(history: History) -> None:
    after(history, "health")[5]["seconds"] = 8.0


def bad_exit(history: History) -> None:
    of(history, "exit")["status"] = 1


def left_behind(history: History) -> None:
    of(history, "exit")["left"] = 1


def traceback(history: History) -> None:
    of(history, "exit")["traceback"] = "Traceback"


def never_ended(history: History) -> None:
    history.remove(of(history, "exit"))


def unused(history: History) -> None:
    for quiet in after(history, "quiet", 0.0):
        quiet["metrics"]["num_preemptions_total"] = 0.0


FAULTS: dict[Callable[[History], None], str] = {
    lost: "request 6 was never answered",
    swapped: "request 6: its answer is that of question 2, and not of 1",
    mixed: "request 6: ['answer numbanswer number 2er 1'], and alone ['answer number 1']",
    mixed_for_one_who_leaves: "request 20006: a part of an answer that is not that of the question alone",
    twice: "request 6 was answered 2 times",
    never_sent: "request 6 was answered, but never sent",
    one_id: "bear the same id cmpl-7",
    other_end: "request 6 ended by ['stop'], and alone ['length']",
    miscounted: "request 6: tokens 8, alone 9",
    other_logprobs: "request 6: logprobs hash, alone hash1",
    malformed: "request 6: a stream ends without [DONE]",
    cut: "request 6: IncompleteReadError",
    refused_for_nothing: "request 100 ended with 500 engine_gone",
    wrong_and_answered: "request 6 ended with 200",
    leak_of_pages: "2 frames are held, first 1",
    lost_frame: "there are 203 frames, first 204",
    held: "num_requests_running is 1.0",
    leak_of_descriptors: "front 10: files may grow by 4",
    burst_of_descriptors: "rank 11 has 12 more files than at first",
    leak_of_threads: "front 10: threads may grow by 2",
    leak_of_memory: "front 10: mb may grow by ",
    slower: "token: CPU of front and rank, ms: the median differs from that of a new server by +2",
    uncounted: "the server counts 5 ended by length, its clients 6 to 12",
    counted_too_much: "the server counts 10060 prompt tokens, its clients 30 to 60",
    not_refused: "the server counts 1 refused, its clients 2",
    never_back: "the server did not tell of a kill, or did not come back",
    told_late: "/health/ready told of a kill after 3.0 s",
    dead_front: "for 8.0 s /health was not answered within 1 s",
    bad_exit: "server 0 ended with status 1",
    left_behind: "server 0 left 1 processes",
    traceback: "server 0 wrote a traceback",
    never_ended: "servers [0] have not ended",
    unused: "nothing happened of num_preemptions_total",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault(fault: Callable[[History], None]) -> None:
    history = copy.deepcopy(WHOLE)
    fault(history)
    violations = found(history)
    assert any(FAULTS[fault] in line for line in violations), violations[:3]


@pytest.mark.parametrize("fault", [slower, told_late, dead_front], ids=lambda fault: fault.__name__)
def test_times_that_are_not_judged(fault: Callable[[History], None]) -> None:
    history = copy.deepcopy(WHOLE)
    fault(history)
    assert found(history, times=False) == []


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
    assert change(hundred, hundred, 0.5) == (0.0, pytest.approx(2**0.5 * 9.5 / 51))
    assert change(hundred, hundred, 0.99) == (0.0, pytest.approx(2**0.5 * 1.0 / 100))
    grown, error = change(hundred, [3 * number for number in hundred], 0.5)
    assert (grown, error) == (2.0, pytest.approx(3 * 2**0.5 * 9.5 / 51))
    assert change(hundred * 100, hundred * 100, 0.5)[1] < 0.02  # ten times as exact
