"""Reads an answer of any of the server's APIs, whole or as a stream, and says what is not well-formed about it."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
PATHS |= {"messages": "/v1/messages"}
ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}  # of messages, by OpenAI's names


@dataclass
class Answer:
    """The answer to a request. Lists have an entry for each choice, in their order."""

    ids: set[str] = field(default_factory=set)  # that the answer bears; a good one has a single one
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)  # "stop" or "length"
    prompt: int | None = None  # tokens
    tokens: int | None = None
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    error: str = ""  # the code or type of an error
    faults: list[str] = field(default_factory=list)  # what is not well-formed

    def expect(self, holds: bool, fault: str) -> None:
        if not holds and fault not in self.faults:
            self.faults.append(fault)

    def add(self, index: int, text: str, logprobs: Any = None) -> None:
        self.expect(index not in self.ends, f"choice {index} goes on after its end")
        self.texts[index] = self.texts.get(index, "") + text
        if logprobs:
            self.logprobs.setdefault(index, []).extend(_pairs(logprobs))

    def end(self, index: int, reason: str | None) -> None:
        if reason is not None:
            self.expect(index not in self.ends, f"choice {index} ends twice")
            self.expect(reason in ("stop", "length"), f"finish reason {reason}")
            self.ends[index] = reason

    def use(self, usage: dict[str, int] | None) -> None:
        if usage:
            self.expect(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "usage: total")
            self.prompt, self.tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def record(self) -> dict[str, Any]:
        """For the history, with a hash in place of log-probabilities."""
        facts: dict[str, Any] = {"ids": sorted(self.ids), "texts": [self.texts[i] for i in sorted(self.texts)]}
        facts |= {"ends": [self.ends[i] for i in sorted(self.ends)], "prompt": self.prompt, "tokens": self.tokens}
        if self.logprobs:
            pairs = json.dumps([self.logprobs[i] for i in sorted(self.logprobs)])
            facts["logprobs"] = hashlib.blake2b(pairs.encode(), digest_size=8).hexdigest()
        if self.error:
            facts["error"] = self.error
        if self.faults:
            facts["faults"] = self.faults
        return facts


def _pairs(logprobs: dict[str, Any]) -> list[Any]:
    """Tokens and their log-probabilities, of completions or of chats."""
    if "content" in logprobs:
        return [[one["token"], one["logprob"]] for one in logprobs["content"]]
    return [list(pair) for pair in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]


def failed(body: Any) -> Answer:
    """Checks an answer with an error's status, whose body is JSON."""
    answer = Answer()
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and {"type", "message"} <= error.keys():
        answer.error = str(error.get("code") or error["type"])
    else:
        answer.expect(False, "no error in the body of an error")
    return answer


def whole(api: str, body: Any) -> Answer:
    """Checks an answer with status 200 that is no stream."""
    answer = Answer({body["id"]})
    if api in ("completions", "chat"):
        for index, choice in enumerate(body["choices"]):
            answer.expect(choice["index"] == index, "choices are not in order")
            text = choice["text"] if api == "completions" else choice["message"]["content"]
            answer.add(choice["index"], text, choice["logprobs"])
            answer.end(choice["index"], choice["finish_reason"])
        answer.use(body["usage"])
    elif api == "responses":
        _response(answer, body)
    else:
        answer.add(0, "".join(block["text"] for block in body["content"]))
        answer.end(0, ENDS.get(body["stop_reason"], body["stop_reason"]))
        _anthropic_usage(answer, body["usage"])
    answer.expect(len(answer.texts) == len(answer.ends), "a choice has no finish reason")
    return answer


def streamed(api: str, data: bytes, cut: bool) -> Answer:
    """Checks the bytes of a stream. With `cut` the client has left before its end."""
    answer, events = Answer(), []
    *blocks, rest = data.decode().split("\n\n")
    answer.expect(cut or not rest, "the last event is not complete")
    for block in blocks:
        name, _, line = block.rpartition("\n")
        if block.startswith(":"):
            continue
        answer.expect(line.startswith("data: ") and "\n" not in name, "a block is no event")
        if line.startswith("data: "):
            event: Any = "[DONE]" if line == "data: [DONE]" else json.loads(line[len("data: ") :])
            events.append(event)
            if name:
                answer.expect(isinstance(event, dict) and name == f"event: {event.get('type')}", "an event's name")
    if not cut or events:
        READERS[api](answer, events, cut)
    if not cut and not answer.error:
        answer.expect(bool(answer.ends), "nothing ends")
        answer.expect(answer.texts.keys() == answer.ends.keys(), "a choice has no finish reason")
    return answer


def _openai(answer: Answer, events: list[Any], cut: bool) -> None:
    """Reads the stream of a completion or a chat."""
    if events and isinstance(events[-1], dict) and "error" in events[-1]:
        answer.error = str(events.pop()["error"]["code"])
    elif not cut:
        answer.expect(events[-1:] == ["[DONE]"], "a stream ends without [DONE]")
    heads, begun = set(), set()
    for number, event in enumerate(events):
        if event == "[DONE]":
            answer.expect(number == len(events) - 1, "events follow [DONE]")
            continue
        answer.ids.add(event["id"])
        heads.add((event["object"], event["created"], event["model"]))
        answer.expect(len(event["choices"]) <= 1, "a chunk of several choices")
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta")
            if delta is not None:
                answer.expect(("role" in delta) == (index not in begun), "a role that is not at the beginning, or none")
                begun.add(index)
            answer.add(index, choice["text"] if delta is None else delta.get("content") or "", choice["logprobs"])
            answer.end(index, choice["finish_reason"])
        answer.expect(bool(event["choices"]) or "usage" in event, "an empty chunk")
        answer.use(event.get("usage"))
    answer.expect(len(heads) <= 1, "chunks of several answers")


def _responses(answer: Answer, events: list[Any], cut: bool) -> None:
    kinds = [event["type"] for event in events]
    answer.expect([event["sequence_number"] for event in events] == list(range(len(events))), "sequence numbers")
    if kinds and kinds[-1] in ("error", "response.failed"):
        answer.error = kinds[-1]
        return
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    answer.ids |= {event["response"]["id"] for event in events if "response" in event}
    if cut:
        answer.add(0, text)
    elif kinds[-1:] in (["response.completed"], ["response.incomplete"]):
        _response(answer, events[-1]["response"])
        answer.expect(answer.texts[0] == text, "the response's text differs from its pieces")
    else:
        answer.expect(False, "a stream ends without its response")


def _response(answer: Answer, body: dict[str, Any]) -> None:
    answer.add(0, "".join(part["text"] for item in body["output"] for part in item["content"]))
    answer.end(0, {"completed": "stop", "incomplete": "length"}.get(body["status"], body["status"]))
    usage = body["usage"]
    answer.use(
        {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
        | {"total_tokens": usage["total_tokens"]}
    )


def _messages(answer: Answer, events: list[Any], cut: bool) -> None:
    kinds = [event["type"] for event in events]
    if kinds and kinds[-1] == "error":
        answer.error = str(events[-1]["error"]["type"])
        return
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    answer.add(0, "".join(deltas))
    answer.ids |= {event["message"]["id"] for event in events if event["type"] == "message_start"}
    if cut:
        return
    block = ["content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop"] if deltas else []
    answer.expect(kinds == ["message_start", *block, "message_delta", "message_stop"], "the order of events")
    if not answer.faults:
        reason = events[-2]["delta"]["stop_reason"]
        answer.end(0, ENDS.get(reason, reason))
        _anthropic_usage(answer, events[-2]["usage"])


def _anthropic_usage(answer: Answer, usage: dict[str, int]) -> None:
    answer.prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    answer.tokens = usage["output_tokens"]


READERS = {"completions": _openai, "chat": _openai, "responses": _responses, "messages": _messages}
