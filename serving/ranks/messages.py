"""The messages between the front and rank 0, and the one that rank 0 shares with all ranks before each step.

Each is one msgpack map with its type's name in `type`. Decoding executes no code, and checks the type of every field.
"""

from typing import Annotated

import msgspec

from umbra.executor.engine.schedule.request import Grammar, Request, SamplingParams, TokenLogprob

Count = Annotated[int, msgspec.Meta(ge=1)]


class ChannelMessage(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True, forbid_unknown_fields=True):
    pass


# Front to rank 0.


class Submit(ChannelMessage, frozen=True):
    """A request. `id` is counted by the front and never used again while it runs."""

    id: int
    ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    salt: bytes = b""
    branches: tuple[int, ...] = ()

    @classmethod
    def of(cls, id: int, request: Request) -> "Submit":
        return cls(id, list(request.ids), request.sampling, request.priority, request.salt, request.branches)

    @property
    def request(self) -> Request:
        return Request(tuple(self.ids), self.sampling, self.priority, self.salt, self.branches)


class Abort(ChannelMessage, frozen=True):
    """Ends a request; it gets no further rows. A request that has ended is left alone."""

    id: int


class Prepare(ChannelMessage, frozen=True):
    """From rank 0 to all ranks: the grammar of a request that will be shared when rank 0 has compiled it."""

    id: int
    grammar: Grammar


class Stop(ChannelMessage, frozen=True):
    """All requests have ended: the ranks leave together."""


class Ping(ChannelMessage, frozen=True):
    number: int


# Rank 0 to the front.


class Progress(ChannelMessage, frozen=True):
    """The progress of the start, for those who ask meanwhile."""

    stage: str
    share: float  # 0 to 1


class Ready(ChannelMessage, frozen=True):
    """The ranks take requests."""

    longest: Count  # most tokens of a prompt and its answer
    batch_size: Count
    vocabulary: Count
    page_size: Count
    pages: Count  # of one data-parallel group
    groups: Count
    stop_ids: list[int]
    prefill_rate: float  # prompt tokens a second, measured in the warm-up
    results: str = ""  # folder of the ranks' logs


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one step for one request."""

    id: int
    tokens: list[int]
    finish: str = ""  # "stop", "length"; empty while it runs
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache, or on disk; in the first row of a request
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, if wanted
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt from token 2 on, in the first row, if wanted
    drafted: int = 0  # tokens that were guessed, of which all of `tokens` but the first were right
    queued_s: float = 0.0  # how long it waited until its first step; in the first row of a request
    restored_tokens: int = 0  # of `cached_tokens`, those that were on disk


class Out(ChannelMessage, frozen=True):
    """The rows of one step."""

    step: int
    rows: list[Row]


class Refused(ChannelMessage, frozen=True):
    """A request that cannot run."""

    id: int
    reason: str


class GroupPages(msgspec.Struct, frozen=True):
    """The pages of one data-parallel group, with those of its sets of recurrent states."""

    held: int  # by sequences
    promised: int  # to them, beyond those
    kept: int  # prefixes without a sequence
    live_states: int = 0  # sets that sequences hold
    kept_states: int = 0  # sets that are kept with prefixes


class Running(msgspec.Struct, frozen=True):
    id: int
    prompt: int  # tokens
    num_computed: int  # of prompt and answer
    generated: int
    longest: int
    preemptions: int


class State(ChannelMessage, frozen=True):
    """A snapshot for metrics and the live page, a few times a second."""

    step: int
    waiting: int
    running: list[Running]
    groups: list[GroupPages]
    preemptions: int  # in total
    drafted: int = 0  # tokens, in total
    accepted: int = 0  # of them
    experts_resident: int = 0  # on rank 0, among those with shadows; so are the following
    experts: int = 0
    expert_hits: int = 0  # pairs of a token and its expert in decode steps, in total
    expert_misses: int = 0
    set_frames: int = 0  # that a set of states takes; 0: the model has none
    arena_frames: int = 0  # pages of the cache, if no expert has a shadow
    expert_frames: int = 0
    free_frames: int = 0
    shadow_exposed_s: float = 0.0  # total time that decode steps waited for shadow experts
    prefill_rate: float = 0.0  # prompt tokens a second, lately
    decode_rate: float = 0.0  # generated tokens a second, lately
    queue: list[Running] = []  # the first of those that wait
    step_tokens: list[int] = []  # tokens of each step since the last snapshot


class Residency(ChannelMessage, frozen=True):
    """The experts that are resident on rank 0, and how much they are used; at most once a second, if somebody
    watches."""

    layers: int
    experts: int
    resident: bytes  # one bit for each expert, layer by layer, the lowest bit first
    heat: bytes  # one byte for each expert, 255 the most used


class Watch(ChannelMessage, frozen=True):
    """From the front: whether somebody looks at the live page."""

    residency: bool


class Pong(ChannelMessage, frozen=True):
    number: int
    step: int


class Fatal(ChannelMessage, frozen=True):
    """The ranks cannot go on; they end after this."""

    reason: str


class Tick(ChannelMessage, frozen=True):
    """From rank 0 to all ranks before each step: everything that comes from a clock, a socket or a measurement, so that
    all ranks decide alike."""

    number: int
    digest: int  # of what rank 0 runs in this step, and of its scheduler
    mixed_tokens: int | None  # Limits.mixed_tokens for this step
    expert_pages: int
    events: list[Submit | Abort | Prepare | Stop]
    restored: int = 0  # DiskPrefixes.most for this step


ToEngine = Submit | Abort | Stop | Ping | Watch
ToFront = Progress | Ready | Out | Refused | State | Residency | Pong | Fatal
