"""POST /v1/completions: prompts as text or token ids, continued."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.base.errors import UserError
from umbra.serving.api.errors import invalid
from umbra.serving.api.fields import Fields, length_of_answer, read, sampling_of, truncated
from umbra.serving.api.front import Front, ServedJob, Text
from umbra.serving.api.jobs import check_grammar, check_length, job_of, nth_job
from umbra.serving.api.logprobs import CompletionLogprobs, TokenTexts, joined
from umbra.serving.api.request_log import Usage
from umbra.serving.api.sse import DONE, event
from umbra.serving.api.streams import Stream, StreamPiece, Turns, together
from umbra.serving.api.structured import grammar_field, wanted_grammar
from umbra.serving.ranks.messages import Ready

MOST_PROMPTS = 64
MAX_TOKENS = 16  # of an answer, if a request does not say, as in OpenAI's API


class CompletionRequest(Fields, kw_only=True):
    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class CompletionDelta(msgspec.Struct, frozen=True):
    """The new part of one of the answers."""

    index: int
    text: str
    finish: str = ""
    logprobs: dict[str, Any] | None = None


@dataclass
class ReadCompletion:
    """A request that was read and can run."""

    front: Front
    request: CompletionRequest
    text: Text
    ready: Ready
    jobs: list[ServedJob]  # one for each prompt
    prompts: list[str]  # their texts, if they are echoed
    usage: Usage
    id: str
    created: int

    @property
    def silent(self) -> bool:
        """Says whether nothing is to be generated, because only the prompt is of interest."""
        return self.request.max_tokens == 0

    async def parts(self) -> AsyncGenerator[CompletionDelta, None]:
        """All answers as they come. Raises ApiError if the request must wait too long."""
        choices, streams = self.request.choices, []
        with self.front.admit(sum(len(job.request.ids) for job in self.jobs), choices * len(self.jobs)) as ticket:
            turns = Turns(ticket.rows)
            for number, job in enumerate(self.jobs):
                for choice in range(choices):
                    stream = Stream(self.front, self.text, self.ready, nth_job(job, choice), self.usage)
                    pieces = turns.pieces(stream, number, choice, ticket)
                    streams.append(self._parts(number, number * choices + choice, stream, pieces))
            async with aclosing(together(streams)) as parts:
                async for part in parts:
                    yield part

    async def _parts(
        self, prompt: int, index: int, stream: Stream, pieces: AsyncGenerator[StreamPiece, None]
    ) -> AsyncGenerator[CompletionDelta, None]:
        wanted = self.request.logprobs
        lists = None if wanted is None else CompletionLogprobs(TokenTexts(self.text), wanted)
        echoed = self.prompts[prompt] if self.request.echo else ""
        first = True
        async with aclosing(pieces):
            async for piece in pieces:
                text, finish, tokens = "".join(piece.texts), piece.finish, piece.tokens
                if self.silent:
                    text, tokens, finish = "", [], "length"
                logprobs = []
                if first and lists and self.request.echo:
                    offsets = offsets_of(stream.job.request.ids, self.text)
                    logprobs.append(lists.prompt(stream.job.request.ids, stream.prompt_logprobs, offsets))
                if lists:
                    logprobs.append(lists.tokens(tokens, len(echoed)))
                yield CompletionDelta(
                    index, (echoed if first else "") + text, finish, joined(logprobs) if logprobs else None
                )
                first = False
                if finish:
                    if self.silent:
                        self.usage.completion = 0
                    return

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.front.name}
        return {**head, "choices": choices, **more}


async def prepare(front: Front, data: Any, salt: bytes) -> ReadCompletion:
    """Reads the request `data`. Raises ApiError if it is wrong."""
    ready, text = front.check_serving()
    return await front.work(lambda: _read(front, data, salt, ready, text))


def _read(front: Front, data: Any, salt: bytes, ready: Ready, text: Text) -> ReadCompletion:
    """All that takes time for large requests; in a thread."""
    request = read(CompletionRequest, data, front.note)
    front.check_model(request.model)
    if request.max_tokens is not None and request.max_tokens < 0:
        raise invalid("max_tokens", f"{request.max_tokens} must be at least 0")
    longest = 1 if request.max_tokens == 0 else MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = prompts_of(request.prompt)
    grammar = wanted_grammar(request, front.note)
    if grammar:
        check_grammar(grammar, grammar_field(request), text)
    special, jobs = request.add_special_tokens is not False, []
    for prompt in prompts:
        ids = encode(prompt, special, text, ready) if isinstance(prompt, str) else prompt
        if wrong := [id for id in ids if id >= ready.vocabulary]:
            raise invalid("prompt", f"token {wrong[0]} is outside the vocabulary of {ready.vocabulary}")
        ids = truncated(request, ids)
        if not ids:
            raise invalid("prompt", "a prompt must have at least one token")
        most = length_of_answer(longest, "max_tokens", len(ids), "prompt", ready.longest)
        sampling = sampling_of(request, front.case, ready, most, grammar, request.logprobs)
        if request.echo and request.logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
        jobs.append(job_of(request, ids, sampling, salt))
    texts = [(p if isinstance(p, str) else text.tokenizer.decode(p)) if request.echo else "" for p in prompts]
    usage = Usage(sum(len(job.request.ids) for job in jobs))
    return ReadCompletion(
        front, request, text, ready, jobs, texts, usage, f"cmpl-{secrets.token_hex(12)}", int(time.time())
    )


async def whole(completion: ReadCompletion) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    choices: dict[int, list[CompletionDelta]] = {}
    async with aclosing(completion.parts()) as parts:
        async for part in parts:
            choices.setdefault(part.index, []).append(part)
    body = []
    for index, deltas in sorted(choices.items()):
        logprobs = [part.logprobs for part in deltas if part.logprobs]
        text = "".join(part.text for part in deltas)
        body.append(_choice(CompletionDelta(index, text, deltas[-1].finish, joined(logprobs) if logprobs else None)))
    return completion.body(body, usage=completion.usage.body())


async def events(completion: ReadCompletion) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    usage: dict[str, Any] = {"usage": None} if completion.request.includes_usage else {}
    async with aclosing(completion.parts()) as parts:
        async for part in parts:
            usage = {"usage": completion.usage.body()} if completion.request.continuous_usage else usage
            yield event(completion.body([_choice(part)], **usage))
    if usage:
        yield event(completion.body([], usage=completion.usage.body()))
    yield DONE


def _choice(part: CompletionDelta) -> dict[str, Any]:
    return {"index": part.index, "text": part.text, "logprobs": part.logprobs, "finish_reason": part.finish or None}


def prompts_of(given: Any) -> list[str | list[int]]:
    """The prompts of a request: one text, several, one list of token ids, or several."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt", "is missing: give a text, token ids, or a list of either")
    if all(type(id) is int and id >= 0 for id in given):
        return [given]
    if len(given) > MOST_PROMPTS:
        raise invalid("prompt", f"{len(given)} prompts are more than {MOST_PROMPTS}")
    for prompt in given:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(id) is int and id >= 0 for id in prompt)
        ):
            raise invalid("prompt", f"{prompt!r:.40} is neither a text nor a list of token ids")
    return list(given)


def encode(prompt: str, special: bool, text: Text, ready: Ready) -> list[int]:
    check_length(prompt, "prompt", text, ready)
    try:
        return text.tokenizer.encode(prompt, chat=False, special=special)
    except UserError as error:
        raise invalid("prompt", str(error)) from None


def offsets_of(ids: Sequence[int], text: Text) -> list[int]:
    """Returns where the text of each prompt token begins, in characters of the prompt's text."""
    detokenizer, offsets, length = text.tokenizer.detokenizer(), [], 0
    for id in ids:
        offsets.append(length)
        length += len(detokenizer.push((id,)))
    return offsets
