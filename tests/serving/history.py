"""Replays the history of a soak (tests/serving/soak.py) and says what must not have happened.

Every request ends exactly once; every answer is the one that the same question got alone, and so is what a client saw
of an answer before it left; streams are well-formed; what is refused had to be; the server's counters agree with the
clients'; nothing is held while no request is open; nothing grows; a server that ran for hours is as fast as a new one.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from serving.ranks.client import FRESH_S
from tests.serving.drift import JUDGED_S, Slope, change, part, slope

LOST_S = 180.0  # a request that takes longer is lost
BEHIND_S = 2.0  # after the ranks are back, in which answers may still tell of their end
DEAD_S, STUCK_S, ALIVE_S = 1.0, 5.0, 1.0  # until /health/ready tells of a death, or of a halt; until /health answers
SILENT = 1e-3  # part of the time in which it may take longer: clients also halt at times, on a busy machine
DRIFT = 0.1  # most that the times of a server that has run for hours may differ from those of a new one
SHARES = 0.1, 0.5, 0.9, 0.99
HOURLY = {"mb": 0.02, "threads": 0.5, "files": 0.5, "pages": 0.5}  # growth allowed; of memory, as a part of it
SHORT = {"threads": 4, "files": 2}  # growth allowed between the quiet times of a process that was not seen for long
ASKS = ("whole", "slow", "vanishes")
REASONS = ("stop", "length", "abort", "error")
Event = dict[str, Any]
Span = tuple[float, float]


def read_history(path: Path) -> Iterator[Event]:
    """The events of a history; its last line may not be complete."""
    with open(path) as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class Checker:
    """`times` says whether to judge what a busy machine makes slow."""

    def __init__(self, events: Iterable[Event], times: bool = True):
        self.events = list(events)
        self.times = times
        self.violations: list[str] = []
        self.of: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self.of[event["what"]].append(event)
        self.questions = {event["key"]: event for event in self.of["question"]}
        self.owner = {tuple(event["texts"]): event["key"] for event in self.of["question"]}
        self.sent = {event["id"]: event for event in self.of["send"]}
        self.ended = {event["id"]: event for event in self.of["end"]}
        self.until = self.events[-1]["t"] if self.events else 0.0
        self.begin = self.of["start"][0]["t"] if self.of["start"] else self.until
        self.whole = bool(self.of["over"])
        for check in (
            self._once, self._ids, self._answers, self._refusals, self._counters, self._quiet, self._growth,
            self._faults, self._exits, self._drift, self._features,
        ):  # fmt: skip
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
            open_ = not self.whole and self.until - self.sent[id]["t"] < LOST_S
            self.expect(ended[id] > 0 or open_, f"request {id} was never answered: {self._told(id)}")
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
        """Whether an answer, or what was seen of it, is that of its question alone."""
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
        """What got no answer had to get none."""
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
        """What the server counted of each life, until it was quiet. Requests of clients that left may count or not."""
        for quiet in self.of["quiet"]:
            metrics, life = quiet["metrics"], quiet["life"]
            known, perhaps = self._asked(life, quiet["t"])
            ended = {reason: metrics.get(f"request_success_total:{reason}", -1) for reason in REASONS}
            rejected = sum(metrics.get(f"admission_rejections_total:{r}", -1) for r in ("queue_full", "too_slow"))
            whole = metrics.get("e2e_request_latency_seconds_count", -1)
            starts = 1 + len([f for f in self.of["mended"] if f["kind"] == "kill" and self._of_life(f, life, quiet)])
            for what, found, least, more in (
                ("ended by stop", ended["stop"], known["stop"], perhaps["requests"]),
                ("ended by length", ended["length"], known["length"], perhaps["requests"]),
                ("requests", sum(ended.values()), known["requests"], perhaps["requests"]),
                ("generated tokens", metrics.get("generation_tokens_total", -1), known["tokens"], perhaps["tokens"]),
                ("prompt tokens", metrics.get("prompt_tokens_total", -1), known["prompt"], perhaps["prompt"]),
                ("whole answers", whole, known["requests"], perhaps["requests"]),
                ("refused", rejected, known["refused"], perhaps["refused"]),
                ("starts of the ranks", metrics.get("engine_starts_total", -1), starts, 0),
            ):
                good = least <= found <= least + more
                between = f"{least}" if not more else f"{least} to {least + more}"
                self.expect(good, f"{self._at(quiet)}: the server counts {found:g} {what}, its clients {between}")

    def _asked(self, life: int, until: float) -> tuple[Counter[str], Counter[str]]:
        """What the server must have counted of a life until then, and what it may have counted beyond it."""
        known, perhaps = Counter[str](), Counter[str]()
        for event in self.of["yardstick"]:
            if event["life"] == life and event["t"] < until:
                known.update(length=1, requests=1, tokens=event["tokens"], prompt=event["prompt"])
        for id, sent in self.sent.items():
            end = self.ended.get(id)
            if sent["life"] != life or sent["client"] not in ASKS or not end or end["t"] > until:
                continue
            alone = self.questions[sent["key"]]
            choices, place = alone["choices"], end.get("at")
            if end["how"] == "answered" and end["status"] == 200 and "error" not in end:
                known.update(end["ends"])
                known.update(requests=choices, tokens=alone["tokens"], prompt=alone["prompt"] * choices)
            elif end.get("status") == 429:
                known["refused"] += 1
            elif place != "body":  # of which the server got but a half
                perhaps.update(requests=choices, tokens=alone["most"], prompt=alone["prompt"] * choices)
                perhaps["refused"] += place == "head"
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
            found = arena.get("arena_frames:sequences", -1), sum(arena.values())
            first = frames.setdefault(rank, found)
            self.expect(found[0] == first[0], f"{self._at(quiet)}: {found[0]:g} frames are held, first {first[0]:g}")
            self.expect(found[1] == first[1], f"{self._at(quiet)}: there are {found[1]:g} frames, first {first[1]:g}")

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
        found = {key: slope(samples) for key, samples in series.items() if samples[-1][0] - samples[0][0] >= JUDGED_S}
        return {key: one for key, one in found.items() if one}

    def _growth(self) -> None:
        for (process, pid, what), found in self.slopes.items():
            allowed = HOURLY[what] * (found.level if what == "mb" else 1)
            self.expect(
                found.most <= allowed,
                f"{process} {pid}: {what} may grow by {found.most:.3g} an hour ({found.hourly:+.3g} ± "
                f"{found.error:.3g}), more than {allowed:.3g}",
            )
        firsts: dict[int, Event] = {}
        for quiet in self.of["quiet"]:
            for process in quiet["processes"]:
                first = firsts.setdefault(process["pid"], process)
                for what, allowed in SHORT.items():
                    grown = process[what] - first[what]
                    who = f"{self._at(quiet)}: {process['name']} {process['pid']}"
                    self.expect(grown <= allowed, f"{who} has {grown} more {what} than at first")

    def _faults(self) -> None:
        """Ranks that were killed came back, and the server told of it."""
        faults = [event for event in self.of["fault"] if event["kind"] != "drain"]
        mended = self.of["mended"]
        late = self.whole or (bool(faults) and self.until - faults[-1]["t"] > 2 * LOST_S)
        self.expect(len(faults) - len(mended) <= (0 if late else 1), "a fault was not mended")
        for event in mended:
            limit = DEAD_S if event["kind"] == "kill" else FRESH_S + STUCK_S
            back = event["told"] is not None and event["took"] is not None
            self.expect(back, f"{self._at(event)}: the server did not tell of a {event['kind']}, or did not come back")
            slow = self.times and event["told"] is not None and event["told"] > limit
            self.expect(not slow, f"{self._at(event)}: /health/ready told of a {event['kind']} after {event['told']} s")
        took = [event["seconds"] for event in self.of["health"]]
        silent = sum(seconds for seconds in took if seconds > ALIVE_S)
        good = not self.times or silent <= SILENT * (self.until - self.begin)
        self.expect(
            good, f"for {silent:.1f} s /health was not answered within {ALIVE_S:g} s, once for {max([0, *took])} s"
        )

    def _exits(self) -> None:
        lives = {event["life"] for event in self.of["ready"]}
        ended = {event["life"] for event in self.of["exit"]}
        self.expect(lives == ended or not self.whole, f"servers {sorted(lives - ended)} have not ended")
        for event in self.of["exit"]:
            where = f"server {event['life']}"
            self.expect(event["status"] == 0, f"{where} ended with status {event['status']}")
            left = f"{event['left']} processes, {event['files']}"
            self.expect(not event["left"] and not event["files"], f"{where} left {left}")
            self.expect(not event["traceback"], f"{where} wrote a traceback: {event['traceback'][-500:]}")

    @cached_property
    def quarters(self) -> dict[str, tuple[list[float], list[float]]]:
        """Times of the first and of the last quarter of the soak: of the same questions in traffic, and of requests of
        one size that had the server to themselves, also as multiples of those of a piece of work beside them. They are
        those of a whole request for one token, or of a token of a longer answer."""
        length = self.of["start"][0]["seconds"] if self.whole else self.until - self.begin
        found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

        def add(t: float, **values: float) -> None:
            place = (t - self.begin) / length
            for name, value in values.items():
                if not 0.25 <= place < 0.75:
                    found[name][place >= 0.75].append(value)

        for event in self.of["yardstick"]:
            if event.get("of"):
                continue
            cpu, each = event["cpu"].get("front", 0.0) + event["cpu"].get("rank", 0.0), event["tokens"]
            times = {
                "CPU of front and rank, of the probe's": cpu / each / event["probe_cpu"],
                "CPU of front and rank, ms": 1e3 * cpu / each,
                "latency, of the probe's": event["took"] / each / event["probe"],
                "latency, ms": 1e3 * event["took"] / each,
            }
            add(event["t"], **{f"{event['kind']}: {name}": value for name, value in times.items()})
        for id, end in self.ended.items():
            sent = self.sent.get(id)
            if sent and sent["client"] == "whole" and sent["stream"] and end["how"] == "answered" and "ends" in end:
                tokens = self.questions[sent["key"]]["tokens"]
                if "error" not in end and tokens > 1:
                    add(sent["t"], **{"first token in traffic: latency, ms": 1e3 * (end["first"] - sent["t"])})
                    each = (end["last"] - end["first"]) / (tokens - 1)
                    add(sent["t"], **{"token in traffic: latency, ms": 1e3 * each})
        return found

    @cached_property
    def pairs(self) -> dict[str, tuple[list[float], list[float]]]:
        """Times of the same requests to a new server, and to the one that ran until the end, in turns."""
        found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for event in self.of["yardstick"]:
            if of := event.get("of"):
                cpu = event["cpu"].get("front", 0.0) + event["cpu"].get("rank", 0.0)
                found[f"{event['kind']}: CPU of front and rank, ms"][of == "old"].append(1e3 * cpu / event["tokens"])
                found[f"{event['kind']}: latency, ms"][of == "old"].append(1e3 * event["took"] / event["tokens"])
        return found

    def _drift(self) -> None:
        for name, (new, old) in self.pairs.items():
            drift = part(old, 0.5) / part(new, 0.5) - 1
            good = abs(drift) <= DRIFT or "CPU" not in name or not self.times
            self.expect(good, f"{name}: the median differs from that of a new server by {drift:+.1%}")

    @cached_property
    def totals(self) -> dict[str, float]:
        """The server's counters, of all lives."""
        last = {event["life"]: event["metrics"] for event in self.of["quiet"]}
        return dict(sum((Counter(metrics) for metrics in last.values()), Counter[str]()))

    def _features(self) -> None:
        """A soak that did not use what it is to test says nothing about it."""
        names = {"prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total", "request_success_total:abort"}
        if self.whole and self.until - self.begin > JUDGED_S:
            names |= {"num_preemptions_total", "expert_misses_total", "admission_rejections_total:queue_full"}
        if self.whole and self.until - self.begin > 60:
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
        """What was found, as Markdown."""
        hours = (self.until - self.begin) / 3600
        ends = Counter(self._end(event) for event in self.of["end"])
        rows = [("length", f"{60 * hours:.1f} minutes" + ("" if self.whole else ", not finished"))]
        rows += [("requests", f"{len(self.sent):,}: " + ", ".join(f"{n:,} {end}" for end, n in ends.most_common()))]
        apis = Counter(f"{e['api']}{', streamed' if e['stream'] else ''}" for e in self.sent.values() if "api" in e)
        rows += [("by API", "; ".join(f"{name}: {n:,}" for name, n in sorted(apis.items())))]
        compared = [e for e in self.ended.values() if e.get("texts") and "error" not in e and e["id"] in self.sent]
        rows += [("compared with the answer alone", f"{len(compared):,} to {len(self.questions)} questions")]
        faults = Counter(event["kind"] for event in self.of["fault"])
        rows += [("faults", ", ".join(f"{n} {kind}" for kind, n in faults.items()))]
        for kind in ("kill", "halt"):
            if mended := [e for e in self.of["mended"] if e["kind"] == kind and e["told"] and e["took"]]:
                told, took = (max(e[name] for e in mended) for name in ("told", "took"))
                rows += [(f"/health/ready tells of a {kind}; serves again", f"{told:.2f} s; {took:.1f} s at most")]
        if health := [1e3 * event["seconds"] for event in self.of["health"]]:
            rows += [("/health, ms: median, longest", f"{part(health, 0.5):.1f}, {max(health):.0f}")]
        rows += [("quiet times", f"{len(self.of['quiet'])}")]
        for name, text in (
            ("prefix_cache_hits_total", "prompt tokens found as prefixes"),
            ("spec_decode_num_accepted_tokens_total", "drafted tokens that were right"),
            ("num_preemptions_total", "preemptions"),
            ("request_success_total:abort", "aborted"),
            ("expert_misses_total", "pairs of a token and a shadow expert"),
            ("generation_tokens_total", "generated tokens"),
        ):
            rows.append((text, f"{self.totals.get(name, 0):,.0f}"))
        for (process, pid, what), found in sorted(self.slopes.items()):
            level = f"{found.level:.4g}{' MB' if what == 'mb' else ''}"
            name = {"mb": "memory", "files": "descriptors"}.get(what, what)
            growth = f"{found.hourly:+.3g} ± {found.error:.2g} an hour"
            rows.append((f"{name} of {process} {pid}", f"{level}, {growth}, over {found.seconds / 60:.0f} minutes"))
        rows.append(("violations", f"{len(self.violations)}"))
        lines = ["| what | found |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
        for both, names in (
            (self.quarters, ("first quarter", "last quarter")),
            (self.pairs, ("a new server", "this one")),
        ):
            lines += ["", f"| p10, p50, p90, p99 | {names[0]} | {names[1]} | change, % |", "|---|---|---|---|"]
            for name, (first, last) in both.items():
                if first and last:
                    cells = [
                        f"{', '.join(f'{part(v, share):.3g}' for share in SHARES)} (of {len(v):,})"
                        for v in (first, last)
                    ]
                    changes = [change(first, last, share) for share in SHARES]
                    shown = ", ".join(f"{100 * value:+.1f} ± {100 * error:.1f}" for value, error in changes)
                    lines.append(f"| {name} | {cells[0]} | {cells[1]} | {shown} |")
        return "\n".join(lines)

    def _end(self, event: Event) -> str:
        status = event.get("status")
        if event["how"] == "answered" and status == 200 and "error" not in event:
            return "answered"
        shown = "" if status in (200, None) else f"{status} "
        told = f"{shown}{event['error']}" if "error" in event else event["how"]
        return told or "answered"
