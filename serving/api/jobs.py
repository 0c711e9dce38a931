"""Makes the engine's requests of an HTTP body, with the checks that completions and chats share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from umbra.executor.engine.schedule.request import LARGEST_SEED, Grammar, Request, SamplingParams
from umbra.serving.api.errors import ApiError, invalid
from umbra.serving.api.fields import Fields
from umbra.serving.api.front import ServedJob, Text
from umbra.serving.api.schemas import closed, held
from umbra.serving.ranks.messages import Ready

UNFOLLOWED = "cannot be enforced: it contradicts itself, or has a pattern or a size that no grammar can hold"


def check_length(prompt: str, param: str, text: Text, ready: Ready) -> None:
    """Refuses a text that has too many tokens, whatever they are, before they are counted."""
    if len(prompt) > ready.longest * text.tokenizer.longest_token:
        message = f"{param}: {len(prompt)} characters are more than {ready.longest} tokens can have: shorten it"
        raise ApiError(400, message, param, "context_length_exceeded")


def check_grammar(grammar: Grammar, param: str, text: Text, wanted: Grammar | None = None) -> None:
    """Raises ApiError if the engine could not follow `grammar`, which comes from the field `param`; may take a while.
    `wanted` is the part of it that the request has, if `grammar` was made of it."""
    compiler = text.compiler
    if problem := compiler.problem(grammar.kind, grammar.text):
        own = wanted and wanted != grammar and compiler.problem(wanted.kind, wanted.text)
        raise invalid(param, own or problem, "invalid_grammar")


def check_calls(grammar: Grammar, tools: Sequence[Mapping[str, Any]], text: Text) -> None:
    """Raises ApiError if the engine could not follow the `grammar` of calls of `tools`; it names the tool whose schema
    is the reason."""
    if not text.compiler.problem(grammar.kind, grammar.text):
        return
    for number, tool in enumerate(tools):
        schema = closed(held(tool["function"].get("parameters") or {})[0])
        if text.compiler.problem("json", json.dumps(schema)):
            reason = f"the schema of {tool['function']['name']} {UNFOLLOWED}"
            raise invalid(f"tools[{number}].function.parameters", reason, "invalid_grammar")
    raise invalid("tools", f"their schemas together {UNFOLLOWED}", "invalid_grammar")


def job_of(
    body: Fields, ids: Sequence[int], sampling: SamplingParams, salt: bytes, branches: tuple[int, ...] = ()
) -> ServedJob:
    """Returns the job of an HTTP body. Its prefixes' salt is that of its key, and one of its own that can only share
    less."""
    if body.cache_salt:
        salt += body.cache_salt.encode(errors="replace")[:256]
    request = Request(tuple(ids), sampling, body.priority or 0, salt, branches)
    return ServedJob(
        request, tuple(body.stops), body.skip_special_tokens is False, bool(body.include_stop_str_in_output)
    )


def nth_job(job: ServedJob, choice: int) -> ServedJob:
    """Returns the job of choice number `choice`: the first has the request's seed, the others have the next ones."""
    sampling = job.request.sampling
    if not choice or sampling.seed is None:
        return job
    sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & LARGEST_SEED)
    return replace(job, request=replace(job.request, sampling=sampling))
