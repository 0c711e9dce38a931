"""The recurrent states of sequences: which set a step reads, which it writes, and which are kept as checkpoints.

A sequence has the states after its last computed token. A step reads them and writes them in place, unless they are
kept: as a checkpoint, of which several sequences may go on, or as those after the sequence's last full page. Then it
writes another set, so that nothing is ever copied.

Checkpoints are kept for later prompts with the pages before them (memory/prefixes.py), since a prefix can only be used
where its states are known. They are made in prompts at the last full page before others will probably go on
differently: at the branches of the request, which are the end of the system prompt and, since templates rewrite what
follows, the begin of the generation prompt; where pages were found without states, since another prompt went on
differently there; and every few thousand tokens. Another one is made of the states after the last full page when a
sequence ends or is preempted, so that what follows an answer goes on from there.

A step with drafts writes the states after the newest token that is certain, with the inputs of the drafted ones. Those
that come true are pending until the next step takes them first, so that what came to nothing leaves no trace.
"""

from collections.abc import Callable

from umbra.executor.engine.memory.pages import States
from umbra.executor.engine.memory.prefixes import PageCache
from umbra.executor.engine.schedule.sequence import Sequence

INTERVAL = 4096  # tokens of a prompt between two checkpoints, if it is not very long
MOST_INSIDE = 8  # checkpoints of a prompt that are made only for their distance


def want_checkpoints(sequence: Sequence, kept: int, size: int) -> None:
    """Chooses the numbers of tokens after which checkpoints are wanted in a sequence that is admitted. `kept` is the
    number of its first tokens whose pages are kept, with or without states."""
    prompt = sequence.prompt_len
    every = -(-max(INTERVAL, -(-prompt // MOST_INSIDE)) // size) * size
    branches = sequence.request.branches or (prompt - 1,)
    wanted = {kept, *(tokens // size * size for tokens in branches), *range(every, prompt, every)}
    sequence.recurrent.wanted = sorted(tokens for tokens in wanted if sequence.num_computed < tokens < prompt)


def cut(sequence: Sequence) -> None:
    """Lets the next step of a prompt end where the second checkpoint is wanted: within a step, there can be one."""
    inside = [tokens for tokens in sequence.recurrent.wanted if sequence.num_computed < tokens < sequence.end]
    if len(inside) > 1:
        sequence.limit = inside[1] - sequence.num_computed


def prepare(cache: PageCache, sequence: Sequence, prefixes: bool, most_kept: Callable[[], int]) -> None:
    """Gives a sequence the sets that its next step writes. A checkpoint takes some of the pages, at most `most_kept()`,
    that are kept for later prompts."""
    own = sequence.recurrent
    states, own.written_at = own.states, sequence.num_computed + 1 if sequence.drafted else sequence.end
    kept = states is None or states.key or states is own.at_page
    own.written = cache.take_states() if kept else states
    if prefixes and (passed := passes_page(sequence, cache.pool.page_size)):
        if not kept:  # in place of those at the page before
            if own.at_page:
                cache.release([own.at_page])
                own.at_page = None
            own.marked, own.mark = cache.take_states(), passed
        return
    mark = next((tokens for tokens in own.wanted if sequence.num_computed < tokens < sequence.end), 0)
    if mark and (room := most_kept() - cache.pool.set_pages) >= 0:
        cache.trim(room)
        own.marked, own.mark = cache.take_states(), mark


def passes_page(sequence: Sequence, size: int) -> int:
    """The end of the last full page, in tokens, that the pending tokens of a sequence pass; 0: they pass none."""
    last = sequence.num_computed // size * size
    return last if last > sequence.recurrent.at else 0


def advance(cache: PageCache, sequence: Sequence, size: int, prefixes: bool) -> None:
    """Records that a step has written the states of a sequence, whose tokens, pages and keys are those after it."""
    own = sequence.recurrent
    before, own.states, own.written = own.states, own.written, None
    own.at = own.written_at
    if before and before.key:
        own.at_page = None  # a checkpoint, which is left to the cache
    if before and before not in (own.states, own.at_page):
        cache.release([before])
    if own.marked and own.mark in own.wanted:
        _keep(cache, sequence, own.marked, own.mark, size)
        cache.release([own.marked])
    elif own.marked:
        own.at_page, own.full = own.marked, own.mark
    own.marked = None
    if prefixes and own.at % size == 0:
        before, own.at_page, own.full = own.at_page, own.states, own.at
        if before:
            cache.release([before])
        if own.at_page and own.full in own.wanted:
            _keep(cache, sequence, own.at_page, own.full, size)


def leave(cache: PageCache, sequence: Sequence, size: int) -> None:
    """Keeps what later prompts may go on from, of a sequence that gives its pages and states back."""
    own = sequence.recurrent
    for states in own.checkpoints:
        cache.touch(states)
    if own.at_page and own.full <= sequence.published * size:
        _keep(cache, sequence, own.at_page, own.full, size)
    own.checkpoints.clear()


def _keep(cache: PageCache, sequence: Sequence, states: States, tokens: int, size: int) -> None:
    cache.keep(states, sequence.keys[tokens // size - 1])
    sequence.recurrent.checkpoints.append(states)
