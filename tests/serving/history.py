"""Replays the history of a soak (tests/serving/soak.py) and says what must not have happened.

Every request ends exactly once; every answer is the one that the same question got alone, and so is what a client saw
of an answer before it left; streams are well-formed; what is refused had to be; the server's counters agree with the
clients'; nothing is held while no request is open; nothing grows; a server that ran for hours is as fast as a new one.
"""

import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from umbra.serving.ranks.client import FRESH_S

LOST_S = 180.0  # a request that takes longer is lost
BEHIND_S = 2.0  # after the ranks are back, in which answers may still tell of their end
DEAD_S, STUCK_S, ALIVE_S = 1.0, 5.0, 1.0  # until /health/ready tells of a death, or of a halt; until /health answers
SILENT = 1e-3  # part of the time in which it may take longer: clients also halt at times, on a busy machine
DRIFT = 0.1  # most that the CPU time of a server that has run for hours may differ from that of a new one
LONG_S = 1200.0  # a soak that takes so long has all faults, its times are judged, and a new server is its yardstick
BLOCKS = 12  # of samples that follow each other: what a process needs for a while alone is not in the least of a block
ERRORS = 2.23  # of a slope: 95 % of the estimates of 12 points lie within so many standard errors (Student's t, 10)
WARM = 0.25  # part of the time in which a process may still grow: until it has met everything that there is
JUDGED_S = 1800.0  # only what was seen for so long has a slope
HOURLY = {"mb": 0.02, "threads": 0.5, "files": 0.5, "pages": 0.5}  # growth allowed; of memory, as a part of it
ASKS = ("whole", "slow", "vanishes")
REASONS = ("stop", "length", "abort", "error")
Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True)
class Slope:
    """A line through the least values of blocks of samples."""

    seconds: float  # that it was fitted over
    level: float  # mean of the least values
    hourly: float  # growth in an hour
    error: float  # half of the 95 % interval of that

    @property
    def most(self) -> float:
        """The growth in an hour that the samples do not rule out."""
        return self.hourly + self.error


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Returns the slope of (time in seconds, value), without the first part of the time. None: there are too few
    samples."""
    if not samples:
        return None
    begin = samples[0][0] + WARM * (samples[-1][0] - samples[0][0])
    kept = [sample for sample in samples if sample[0] >= begin]
    if len(kept) < BLOCKS:
        return None
    bounds = [len(kept) * i // BLOCKS for i in range(BLOCKS + 1)]
    blocks = [kept[a:b] for a, b in itertools.pairwise(bounds)]
    times = [statistics.fmean(t for t, _ in block) / 3600 for block in blocks]
    values = [min(value for _, value in block) for block in blocks]
    mean_t, mean_v = statistics.fmean(times), statistics.fmean(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if not spread:
        return None
    hourly = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
    rest = sum((v - mean_v - hourly * (t - mean_t)) ** 2 for t, v in zip(times, values, strict=True))
    error = ERRORS * (rest / (BLOCKS - 2) / spread) ** 0.5
    return Slope(kept[-1][0] - kept[0][0], mean_v, hourly, error)


class Checker:
    """Judges the history of a soak that has ended."""

    def __init__(self, events: Iterable[Event]):
        self.events = list(events)
        self.violations: list[str] = []
        self.of: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self.of[event["what"]].append(event)
        self.questions = {event["key"]: event for event in self.of["question"]}
        self.owner = {tuple(event["texts"]): event["key"] for event in self.of["question"]}
        self.sent = {event["id"]: event for event in self.of["send"]}
        self.ended = {event["id"]: event for event in self.of["end"]}
        self.begin, self.until = self.of["start"][0]["t"], self.events[-1]["t"]
        self.long = self.until - self.begin >= LONG_S
        for check in (
            self._once,
            self._ids,
            self._answers,
            self._refusals,
            self._counters,
            self._quiet,
            self._growth,
            self._faults,
            self._exits,
            self._drift,
            self._features,
        ):
            check()

    def expect(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    def _once(self) -> None:
        """Every request ends exactly once."""
        sent = Counter(event["id"] for event in self.of["send"])
        ended = Counter(event["id"] for event in self.of["end"])
        for id, count in sent.items():
            self.expect(count == 1, f"request {id} was sent {count} times")
            self.expect(ended[id] > 0, f"request {id} was never answered: {self._told(id)}")
        for id, count in ended.items():
            self.expect(count == 1, f"request {id} was answered {count} times")
            self.expect(id in sent, f"request {id} was answered, but never sent")

    def _ids(self) -> None:
        """No two answers bear one id."""
        bearers: dict[str, int] = {}
        for id, end in self.ended.items():
            for own in end.get("ids", ()):
                other = bearers.setdefault(own, id)
                self.expect(other == id, f"the answers to requests {other} and {id} bear the same id {own}")

    def _answers(self) -> None:
        for id, end in self.ended.items():
            sent = self.sent.get(id)
            if not sent:
                continue
            for fault in end.get("faults", ()):
                self.violations.append(f"request {id}: {fault}: {self._told(id)}")
            if end["how"] in ("lost", "cut"):
                again = end["how"] == "cut" and self._within(sent, end, self.drains)
                self.expect(again, f"request {id}: {end.get('why')}: {self._told(id)}")
            if end.get("status") == 200 and sent["client"] in ASKS:
                self._compare(id, sent, end, self.questions[sent["key"]])

    def _compare(self, id: int, sent: Event, end: Event, alone: Event) -> None:
        """Checks that an answer, or the part of it that was seen, is that of its question alone."""
        texts, wanted = end["texts"], alone["texts"]
        if end["how"] == "vanished" or "error" in end:
            good = len(texts) <= len(wanted) and all(any(w.startswith(t) for w in wanted) for t in texts)
            self.expect(good, f"request {id}: a part of an answer that is not that of the question alone: {texts}")
            return
        other = self.owner.get(tuple(texts))
        if texts != wanted and other is not None:
            self.violations.append(f"request {id}: its answer is that of question {other}, and not of {sent['key']}")
            return
        self.expect(texts == wanted, f"request {id}: {texts}, and alone {wanted}: {self._told(id)}")
        self.expect(end["ends"] == alone["ends"], f"request {id} ended by {end['ends']}, and alone {alone['ends']}")
        for name in ("prompt", "tokens", "logprobs"):
            if end.get(name) is not None:
                self.expect(end[name] == alone.get(name), f"request {id}: {name} {end[name]}, alone {alone.get(name)}")

    def _refusals(self) -> None:
        """Checks that every request without an answer had to get none."""
        for id, end in self.ended.items():
            sent = self.sent.get(id)
            if not sent or not ("status" in end or end["how"] == "unreachable"):
                continue
            status, died = end.get("status"), self._within(sent, end, self.deaths)
            ending = self._within(sent, end, self.drains)
            if end["how"] == "unreachable":
                good = ending
            elif sent["client"] == "wrong":
                good = status == sent["wanted"] or (status == 503 and (ending or died))
            elif status == 200:
                good = "error" not in end or died
            elif status == 429:
                good = sent["client"] in ASKS
            else:
                good = (status in (500, 503) and died) or (status == 503 and ending)
            self.expect(good, f"request {id} ended with {status} {end.get('error', '')}: {self._told(id)}")

    def _counters(self) -> None:
        """Checks the server's counters of each life, until it was quiet. Requests of clients that left may count or
        not."""
        for quiet in self.of["quiet"]:
            metrics, life = quiet["metrics"], quiet["life"]
            known, perhaps = self._asked(life, quiet["t"])
            ended = {reason: metrics.get(f"request_success_total:{reason}", -1) for reason in REASONS}
            rejected = sum(metrics.get(f"admission_rejections_total:{r}", -1) for r in ("queue_full", "too_slow"))
            whole = metrics.get("e2e_request_latency_seconds_count", -1)
            starts = 1 + len([f for f in self.of["mended"] if f["kind"] == "kill" and self._of_life(f, life, quiet)])
            for what, counted, least, more in (
                ("ended by stop", ended["stop"], known["stop"], perhaps["requests"]),
                ("ended by length", ended["length"], known["length"], perhaps["requests"]),
                ("requests", sum(ended.values()), known["requests"], perhaps["requests"]),
                ("generated tokens", metrics.get("generation_tokens_total", -1), known["tokens"], perhaps["tokens"]),
                ("prompt tokens", metrics.get("prompt_tokens_total", -1), known["prompt"], perhaps["prompt"]),
                ("whole answers", whole, known["requests"], perhaps["requests"]),
                ("refused", rejected, known["refused"], perhaps["refused"]),
                ("starts of the ranks", metrics.get("engine_starts_total", -1), starts, 0),
            ):
                good = least <= counted <= least + more
                between = f"{least}" if not more else f"{least} to {least + more}"
                self.expect(good, f"{self._at(quiet)}: the server counts {counted:g} {what}, its clients {between}")

    def _asked(self, life: int, until: float) -> tuple[Counter[str], Counter[str]]:
        """Returns what the server must have counted of a life until then, and what it may have counted beyond it."""
        known, perhaps = Counter[str](), Counter[str]()
        for id, sent in self.sent.items():
            end = self.ended.get(id)
            if sent["life"] != life or sent["client"] not in ASKS or not end or end["t"] > until:
                continue
            alone = self.questions[sent["key"]]
            choices, cut_at = alone["choices"], end.get("at")
            if end["how"] == "answered" and end["status"] == 200 and "error" not in end:
                known.update(end["ends"])
                known.update(requests=choices, tokens=alone["tokens"], prompt=alone["prompt"] * choices)
            elif end.get("status") == 429:
                known["refused"] += 1
            elif cut_at != "body":  # of which the server got but a half
                perhaps.update(requests=choices, tokens=alone["most"], prompt=alone["prompt"] * choices)
                perhaps["refused"] += cut_at == "head"
        return known, perhaps

    def _quiet(self) -> None:
        """While no request is open, nothing is held, and every frame of the arena is accounted for."""
        frames: dict[int, tuple[float, float]] = {}  # of a rank, when it was first quiet: of sequences, and all
        for quiet in self.of["quiet"]:
            metrics = quiet["metrics"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                self.expect(metrics.get(name) == 0, f"{self._at(quiet)}: {name} is {metrics.get(name)}")
            arena = {name: frames for name, frames in metrics.items() if name.startswith("arena_frames")}
            rank = next((p["pid"] for p in quiet["processes"] if p["name"] == "rank"), 0)
            frames_now = arena.get("arena_frames:sequences", -1), sum(arena.values())
            first = frames.setdefault(rank, frames_now)
            self.expect(
                frames_now[0] == first[0], f"{self._at(quiet)}: {frames_now[0]:g} frames are held, first {first[0]:g}"
            )
            self.expect(
                frames_now[1] == first[1], f"{self._at(quiet)}: there are {frames_now[1]:g} frames, first {first[1]:g}"
            )

    @cached_property
    def slopes(self) -> dict[tuple[str, int, str], Slope]:
        """By a process's name and id, and what was measured. Memory all the time; threads and descriptors only while no
        request was open, since each has some."""
        series: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
        for kind, names in (("look", ("mb",)), ("quiet", ("threads", "files"))):
            for event in self.of[kind]:
                for process in event["processes"]:
                    for name in names:
                        series[process["name"], process["pid"], name].append((event["t"], process[name]))
        for event in self.of["quiet"]:
            for process in event["processes"]:
                if process["name"] == "rank":
                    held = event["metrics"].get("arena_frames:sequences", 0)
                    series["rank", process["pid"], "pages"].append((event["t"], held))
        slopes = {key: slope(samples) for key, samples in series.items() if samples[-1][0] - samples[0][0] >= JUDGED_S}
        return {key: one for key, one in slopes.items() if one}

    def _growth(self) -> None:
        for (process, pid, what), growth in self.slopes.items():
            allowed = HOURLY[what] * (growth.level if what == "mb" else 1)
            self.expect(
                growth.most <= allowed,
                f"{process} {pid}: {what} may grow by {growth.most:.3g} an hour ({growth.hourly:+.3g} ± "
                f"{growth.error:.3g}), more than {allowed:.3g}",
            )

    def _faults(self) -> None:
        """Ranks that were killed came back, and the server told of it."""
        faults = [event for event in self.of["fault"] if event["kind"] != "drain"]
        mended = self.of["mended"]
        self.expect(len(faults) == len(mended), "a fault was not mended")
        for event in mended:
            limit = DEAD_S if event["kind"] == "kill" else FRESH_S + STUCK_S
            back = event["told"] is not None and event["took"] is not None
            self.expect(back, f"{self._at(event)}: the server did not tell of a {event['kind']}, or did not come back")
            slow = self.long and event["told"] is not None and event["told"] > limit
            self.expect(not slow, f"{self._at(event)}: /health/ready told of a {event['kind']} after {event['told']} s")
        took = [event["seconds"] for event in self.of["health"]]
        silent = sum(seconds for seconds in took if seconds > ALIVE_S)
        good = not self.long or silent <= SILENT * (self.until - self.begin)
        self.expect(
            good, f"for {silent:.1f} s /health was not answered within {ALIVE_S:g} s, once for {max([0, *took])} s"
        )

    def _exits(self) -> None:
        lives = {event["life"] for event in self.of["ready"]}
        ended = {event["life"] for event in self.of["exit"]}
        self.expect(lives == ended, f"servers {sorted(lives - ended)} have not ended")
        for event in self.of["exit"]:
            where = f"server {event['life']}"
            self.expect(event["status"] == 0, f"{where} ended with status {event['status']}")
            left = f"{event['left']} processes, {event['files']}"
            self.expect(not event["left"] and not event["files"], f"{where} left {left}")
            self.expect(not event["traceback"], f"{where} wrote a traceback: {event['traceback'][-500:]}")

    def _drift(self) -> None:
        for event in self.of["compared"]:
            drift = event["old"] / event["new"] - 1
            self.expect(abs(drift) <= DRIFT, f"CPU time differs from that of a new server by {drift:+.1%}")

    @cached_property
    def totals(self) -> dict[str, float]:
        """The server's counters, of all lives."""
        last = {event["life"]: event["metrics"] for event in self.of["quiet"]}
        return dict(sum((Counter(metrics) for metrics in last.values()), Counter[str]()))

    def _features(self) -> None:
        """A soak that did not use what it is to test says nothing about it."""
        names = {"prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total", "request_success_total:abort"}
        if self.long:
            names |= {"num_preemptions_total", "expert_misses_total", "admission_rejections_total:queue_full"}
        for name in sorted(names):
            self.expect(self.totals.get(name, 0) > 0, f"nothing happened of {name}")

    @cached_property
    def deaths(self) -> list[Span]:
        """The times in which answers may tell that ranks have ended."""
        return self._spans("kill", self.of["mended"], BEHIND_S)

    @cached_property
    def drains(self) -> list[Span]:
        """The times from which a server ended until the next one was ready."""
        return self._spans("drain", self.of["ready"], 0.0)

    def _spans(self, kind: str, ends: list[Event], behind: float) -> list[Span]:
        starts = [event["t"] for event in self.of["fault"] if event["kind"] == kind]
        return [(t, min((e["t"] + behind for e in ends if e["t"] > t), default=float("inf"))) for t in starts]

    def _within(self, sent: Event, end: Event, spans: list[Span]) -> bool:
        return any(sent["t"] <= b and end["t"] >= a for a, b in spans)

    def _of_life(self, event: Event, life: int, quiet: Event) -> bool:
        ready = next((e["t"] for e in self.of["ready"] if e["life"] == life), 0.0)
        return ready < event["t"] < quiet["t"]

    def _at(self, event: Event) -> str:
        return f"{event['t'] - self.begin:.0f} s"

    def _told(self, id: int) -> str:
        sent = self.sent[id]
        return f"{self._at(sent)}, {json.dumps({k: v for k, v in sent.items() if k not in ('t', 'what')})}"

    def table(self) -> str:
        """Returns the results as a Markdown table."""
        ends = Counter(f"{e.get('status', '')} {e.get('error', e['how'])}".strip() for e in self.of["end"])
        compared = [e for e in self.ended.values() if e.get("texts") and "error" not in e and e["id"] in self.sent]
        rows = {
            "minutes": f"{(self.until - self.begin) / 60:.1f}",
            "requests": f"{len(self.sent):,}: " + ", ".join(f"{n:,} {end}" for end, n in ends.most_common()),
            "compared with the answer alone": f"{len(compared):,} to {len(self.questions)} questions",
            "faults": ", ".join(f"{n} {kind}" for kind, n in Counter(e["kind"] for e in self.of["fault"]).items()),
        }
        rows |= {name: f"{value:,.0f}" for name, value in sorted(self.totals.items()) if name.endswith("_total")}
        for (process, pid, what), trend in sorted(self.slopes.items()):
            growth = f"{trend.level:.4g}, {trend.hourly:+.3g} ± {trend.error:.2g} an hour"
            rows[f"{what} of {process} {pid}"] = f"{growth}, over {trend.seconds / 60:.0f} minutes"
        rows["violations"] = f"{len(self.violations)}"
        return "\n".join(["| what | found |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])
