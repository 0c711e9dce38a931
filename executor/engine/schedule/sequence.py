"""A request on its way through the engine."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbra.base.errors import UserError
from umbra.executor.engine.drafts.ngrams import NgramIndex
from umbra.executor.engine.memory.pages import Block, Holding, States
from umbra.executor.engine.schedule.request import Request, TokenLogprob

if TYPE_CHECKING:
    from umbra.executor.engine.schedule.grammar import Matcher

FAILED = -1  # in place of a token: the one that was chosen does not follow the grammar


@dataclass(eq=False, slots=True)
class SequenceStates:
    """The recurrent states of a sequence, while it runs (states.py)."""

    states: States | None = None  # those after its computed tokens; None: those before any token
    at: int = 0  # number of tokens that they have taken: all computed ones, but for drafts that came true
    written: States | None = None  # where its next step writes those after its first `written_at` tokens
    written_at: int = 0
    at_page: States | None = None  # those after its first `full` tokens, whole pages, which may become a checkpoint
    full: int = 0
    marked: States | None = None  # a checkpoint that its next step makes, after its first `mark` tokens
    mark: int = 0
    wanted: list[int] = field(default_factory=list)  # numbers of tokens after which checkpoints are wanted, ascending
    checkpoints: list[States] = field(default_factory=list)  # that it has made

    @property
    def held(self) -> list[States]:
        """The sets that the sequence holds, each once."""
        return [states for states in dict.fromkeys((self.states, self.written, self.at_page)) if states]


@dataclass(eq=False, slots=True)
class Sequence:
    id: int
    request: Request
    ids: "array[int]"  # prompt and generated tokens, int64
    arrival: int = 0  # orders the sequences of a scheduler
    ends: frozenset[int] = frozenset()  # tokens that end it
    group: int = 0  # the data-parallel group that runs it
    num_computed: int = 0  # number of `ids` that are in the KV cache
    limit: int | None = None  # most tokens of the next step; None: all that are not computed yet
    held: list[Holding] = field(default_factory=list)  # its pages for each set of layers, while it runs
    recurrent: SequenceStates = field(default_factory=SequenceStates)
    promised: int = 0  # number of pages that it may have at least, those that it holds included
    covered: int = 0  # number of tokens that these suffice for
    keys: list[bytes] = field(default_factory=list)  # keys of the full pages of `ids`, as far as they are computed
    published: int = 0  # number of its first pages that later prompts can find
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache when it was first admitted, or on disk
    stored: int | None = None  # number of its first pages, if more than `published`, that are read from disk; 0: none
    read: int = 0  # number of records of these that have been read
    restored_tokens: int = 0  # those of `cached_tokens` that were on disk
    expanded: int = 0  # number of first tokens whose attention over latents is expanded: the prompt's, or none
    preemptions: int = 0
    matcher: "Matcher | None" = None  # of its grammar
    drafted: int = 0  # number of the last `ids` that are only guessed, while a step checks them
    guesses: "array[int]" = field(default_factory=lambda: array("q"))  # of its next tokens, made after its last step
    rates: list[float] = field(default_factory=list)  # how often guesses come true, by position; empty: none was made
    checked: int = 0  # how often a guess for it was found to be true or not
    taken: int = 0  # number of its first tokens that the layer which guesses tokens has taken
    ngrams: NgramIndex = field(default_factory=NgramIndex)  # which its drafts are looked up in
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # if wanted, of the prompt tokens computed so far
    finish_reason: str = ""  # "stop", "length", "abort"; empty while the request runs
    prompt_len: int = field(init=False)
    longest: int = field(init=False)  # number of tokens that it can grow to

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.ids)
        self.longest = self.prompt_len + self.request.sampling.max_tokens

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_len :].tolist()

    @property
    def decoding(self) -> bool:
        """Says whether all tokens but the newest generated one are computed, so that the next step takes that token and
        drafted ones."""
        count = len(self.ids) - self.drafted
        return count > self.prompt_len and self.num_computed == count - 1

    @property
    def new_tokens(self) -> int:
        """Number of tokens that the next step takes: one and drafted ones while decoding, else the prompt or a chunk of
        it."""
        return self.end - self.num_computed

    @property
    def end(self) -> int:
        """Number of `ids` that are computed after the next step."""
        count, limit = len(self.ids), self.limit
        return count if limit is None else min(self.num_computed + limit, count)

    @property
    def blocks(self) -> list[Block]:
        """All pages and sets of states that it holds."""
        return [block for held in self.held for block in held.blocks] + self.recurrent.held

    @property
    def pages(self) -> int:
        """Number of pages that all of these take."""
        return sum(len(held.blocks) for held in self.held) + sum(states.pages for states in self.recurrent.held)

    @property
    def pending(self) -> int:
        """Number of computed tokens of which its states have only kept the inputs."""
        return self.num_computed - self.recurrent.at

    @property
    def logit_rows(self) -> int:
        """Number of tokens of the next step whose logits are wanted."""
        return self.new_tokens if self.scored else 1

    @property
    def scored(self) -> bool:
        """Says whether the next step computes prompt tokens whose log-probabilities are wanted."""
        wanted = self.request.sampling.prompt_logprobs is not None and len(self.ids) == self.prompt_len
        return wanted and self.num_computed < self.prompt_len - 1

    @property
    def complete(self) -> bool:
        """Says whether all of `ids` are computed after the next step, so that the step chooses another token."""
        return self.end == len(self.ids)


def new_sequence(id: int, request: Request) -> Sequence:
    try:
        return Sequence(id, request, array("q", request.ids))
    except (TypeError, OverflowError) as error:
        raise UserError(f"prompt {id}: its tokens must be integers: {error}") from None
