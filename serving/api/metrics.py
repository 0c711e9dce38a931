"""Metrics of the server for Prometheus, under vLLM's names with `umbra:` in front, and times of the last minute."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from umbra.serving.api.request_log import HttpRecord
from umbra.serving.ranks.messages import ChannelMessage, GroupPages, Ready, Row, State

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "umbra:"
TENANTS = ("sequences", "prefixes", "states", "experts", "free")
REASONS = ("queue_full", "too_slow", "timeout")
ENDS = ("stop", "length", "abort", "error")
WINDOW_S = 60.0
PAST_S, PAST = 1.0, 300  # seconds between two samples for the page, and number of samples
SAMPLES = 8192  # most in a window
# Upper bounds of histograms: seconds of whole requests, to the first token, between tokens; tokens.
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
STEP_TOKENS = tuple(2**e for e in range(15))
disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of creation times with each counter


class Window:
    """Values of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def add(self, value: float) -> None:
        self._values.append((self.clock(), value))

    def percentiles(self, *shares: float) -> list[float | None]:
        """The values below which each of these shares lies; None without values."""
        old = self.clock() - WINDOW_S
        while self._values and self._values[0][0] < old:
            self._values.popleft()
        values = sorted(value for _, value in self._values)
        return [values[min(int(share * len(values)), len(values) - 1)] if values else None for share in shares]


@dataclass(frozen=True)
class ServerSample:
    """The server at one time. Hits and misses are totals since the start."""

    at: float
    memory: dict[str, int]
    rate: float  # generated tokens a second since the sample before
    hits: int
    misses: int


def memory(state: State) -> dict[str, int]:
    """Returns how the frames of rank 0's arena are divided. The padding page counts as a sequence's."""
    group = state.groups[0] if state.groups else GroupPages(0, 0, 0)
    states = (group.live_states + group.kept_states) * state.set_frames
    prefixes = group.kept - group.kept_states * state.set_frames
    others = prefixes, states, state.expert_frames, state.free_frames
    return dict(zip(TENANTS, (state.arena_frames - sum(others), *others), strict=True))


class Total:
    """Adds to a counter what a total that the ranks count has grown by; after a restart they count from 0."""

    def __init__(self, counter: Counter):
        self.counter, self.last = counter, 0.0

    def set(self, total: float) -> None:
        self.counter.inc(total - self.last if total >= self.last else total)
        self.last = total


class Metrics:
    """`model_name` is the value of the label by which vLLM's boards select; `disk`: whether prefixes are on disk."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic, disk: bool = False):
        self.disk = disk
        self.registry, self.clock, self._model = CollectorRegistry(), clock, model_name
        self.first_token, self.between_tokens = Window(clock), Window(clock)  # seconds
        self.past: deque[ServerSample] = deque(maxlen=PAST)
        self.since: dict[int, float] = {}  # id -> when a request that runs or waits was first seen
        self.tokens = self.looked_for = self.cached_tokens = 0  # generated; of prompts; of those in the prefix cache
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for room in the batch.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Part of the KV cache that sequences hold; 1: all.")
        self.preemptions = Total(self._counter("num_preemptions", "Requests that were preempted for want of memory."))
        self.drafted = Total(self._counter("spec_decode_num_draft_tokens", "Tokens drafted by speculative decoding."))
        self.accepted = Total(self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."))
        self.drafts = self._counter("spec_decode_num_drafts", "Steps of a request with drafted tokens.")
        self.by_position = self._counters(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by position.", "position", ()
        )
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.disk_queries = self._counter("external_prefix_cache_queries", "Prompt tokens looked for on disk.")
        self.disk_hits = self._counter("external_prefix_cache_hits", "Prompt tokens found on disk.")
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.generated = self._counter("generation_tokens", "Generated tokens.")
        self.rejections = self._counters("admission_rejections", "Requests that were not taken.", "reason", REASONS)
        self.unread = self._counter("request_unread_fields", "Fields of requests that nothing reads.")
        self.ended = self._counters("request_success", "Requests that have ended.", "finished_reason", ENDS)
        self.ttft_s = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST)
        self.itl_s = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", BETWEEN)
        self.tpot_s = self._histogram("request_time_per_output_token_seconds", "Mean of a request's gaps.", BETWEEN)
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", LONG)
        self.queue_s = self._histogram("request_queue_time_seconds", "From arrival to the first step.", LONG)
        self.prefill_s = self._histogram("request_prefill_time_seconds", "First step to first token.", LONG)
        self.decode_s = self._histogram("request_decode_time_seconds", "First token to last token.", LONG)
        self.inference_s = self._histogram("request_inference_time_seconds", "First step to last token.", LONG)
        self.prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.answers = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens that a step computes.", STEP_TOKENS)
        self.starts = self._counter("engine_starts", "How often the ranks became ready.")
        self.experts = self._gauge("experts", "Experts with shadows on rank 0.")
        self.resident = self._gauge("experts_resident", "Those of rank 0's experts that are resident.")
        self.expert_hits = Total(self._counter("expert_hits", "Pairs of token and resident expert, in decode steps."))
        self.expert_misses = Total(self._counter("expert_misses", "Pairs of token and shadow, in decode steps."))
        self.exposed_s = Total(self._counter("shadow_exposed_seconds", "For which decode steps waited for shadows."))
        frames = Gauge("umbra:arena_frames", "Rank 0's memory.", ["model_name", "tenant"], registry=self.registry)
        self.frames = {tenant: frames.labels(model_name, tenant) for tenant in TENANTS}
        sets = Gauge("umbra:state_sets", "Sets of recurrent states.", ["model_name", "holder"], registry=self.registry)
        self.live_states, self.kept_states = (sets.labels(model_name, holder) for holder in ("sequences", "prefixes"))
        self._rejected: dict[str, Total] = {}
        self._pages = 1  # of all groups
        self._sampled = (clock(), 0)  # time and tokens

    def text(self, rejected: Mapping[str, int]) -> bytes:
        """All metrics in the format of `CONTENT_TYPE`. `rejected` has the number of requests that were not taken, by
        reason."""
        for reason, count in rejected.items():
            self._rejected.setdefault(reason, Total(self.rejections(reason))).set(count)
        return generate_latest(self.registry)

    def arrived(self, prompt_tokens: int, record: HttpRecord | None = None) -> "Timeline":
        """To be called when a sequence, of the HTTP request that `record` is kept of, has been taken."""
        return Timeline(self, prompt_tokens, record or HttpRecord(""))

    def take(self, message: ChannelMessage) -> None:
        """To be called with each message of the engine that is not a row."""
        if isinstance(message, Ready):
            self.starts.inc()
            self._pages = message.pages * message.groups
        elif isinstance(message, State):
            self.running.set(len(message.running))
            self.waiting.set(message.waiting)
            self.kv_usage.set(sum(group.held for group in message.groups) / self._pages)
            self.preemptions.set(message.preemptions)
            self.drafted.set(message.drafted)
            self.accepted.set(message.accepted)
            for tokens in message.step_tokens:
                self.step_tokens.observe(tokens)
            self.experts.set(message.experts)
            self.resident.set(message.experts_resident)
            self.expert_hits.set(message.expert_hits)
            self.expert_misses.set(message.expert_misses)
            self.exposed_s.set(message.shadow_exposed_s)
            for tenant, frames in memory(message).items():
                self.frames[tenant].set(frames)
            self.live_states.set(sum(group.live_states for group in message.groups))
            self.kept_states.set(sum(group.kept_states for group in message.groups))
            self._sample(message)

    def _sample(self, state: State) -> None:
        now, (at, tokens) = self.clock(), self._sampled
        self.since = {request.id: self.since.get(request.id, now) for request in (*state.running, *state.queue)}
        if now - at >= PAST_S:
            self._sampled = now, self.tokens
            rate = (self.tokens - tokens) / (now - at)
            self.past.append(ServerSample(now, memory(state), rate, state.expert_hits, state.expert_misses))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counters(self, name: str, text: str, label: str, known: tuple[str, ...]) -> Callable[[str], Counter]:
        """-> the counter of a value of `label`; those of `known` values begin at 0."""
        counter = Counter(PREFIX + name, text, ["model_name", label], registry=self.registry)
        for value in known:
            counter.labels(self._model, value)
        return lambda value: counter.labels(self._model, value)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(
            self._model
        )


class Timeline:
    """The times of one request for the metrics. Leaving its block ends it, if it has not ended: as aborted or, with an
    error, as failed."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, record: HttpRecord):
        self.metrics, self.prompt_tokens, self.record = metrics, prompt_tokens, record
        self.arrived = self.first = self.last = metrics.clock()
        self.tokens, self.queued_s, self.ended = 0, 0.0, False

    async def __aenter__(self) -> "Timeline":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end("error" if kind and issubclass(kind, Exception) else "abort")

    def row(self, row: Row) -> None:
        """To be called with each row of the request."""
        metrics, now = self.metrics, self.metrics.clock()
        metrics.generated.inc(len(row.tokens))
        metrics.tokens += len(row.tokens)
        metrics.drafts.inc(row.drafted > 0)
        for position in range(len(row.tokens) - 1):
            metrics.by_position(str(position)).inc()
        if not self.tokens:
            self.first, self.queued_s = now, row.queued_s
            metrics.prompt.inc(self.prompt_tokens)
            metrics.prefix_queries.inc(self.prompt_tokens)
            metrics.prefix_hits.inc(row.cached_tokens - row.restored_tokens)
            if metrics.disk:
                metrics.disk_queries.inc(self.prompt_tokens - row.cached_tokens + row.restored_tokens)
                metrics.disk_hits.inc(row.restored_tokens)
            metrics.looked_for += self.prompt_tokens
            metrics.cached_tokens += row.cached_tokens
            metrics.queue_s.observe(row.queued_s)
            metrics.ttft_s.observe(now - self.arrived)
            metrics.first_token.add(now - self.arrived)
        else:
            metrics.itl_s.observe(now - self.last)
            metrics.between_tokens.add(now - self.last)
        self.last, self.tokens = now, self.tokens + len(row.tokens)
        self.record.token()
        if row.finish:
            self.end(row.finish)

    def end(self, reason: str) -> None:
        """`reason` is "stop", "length", "abort" or "error". Only the first call counts."""
        if self.ended:
            return
        self.ended = True
        self.record.reasons.append(reason)
        metrics = self.metrics
        metrics.ended(reason).inc()
        if reason in ("stop", "length"):
            begun, decode = self.arrived + self.queued_s, self.last - self.first
            metrics.e2e_s.observe(self.last - self.arrived)
            metrics.prefill_s.observe(self.first - begun)
            metrics.decode_s.observe(decode)
            metrics.inference_s.observe(self.last - begun)
            metrics.prompts.observe(self.prompt_tokens)
            metrics.answers.observe(self.tokens)
            if self.tokens > 1:
                metrics.tpot_s.observe(decode / (self.tokens - 1))
