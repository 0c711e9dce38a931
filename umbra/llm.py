"""A model in this process: text in, text out, on one rank.

from umbra import LLM, SamplingParams
llm = LLM("demo")
for out in llm.generate(["Emma was"], SamplingParams(max_tokens=20, temperature=0.8, seed=1)):
    print(out.text)
for piece in llm.stream("Emma was"):
    print(piece, end="")
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec

from umbra.base.errors import UserError
from umbra.base.files import WORK
from umbra.executor.config.case import Case
from umbra.executor.config.env import rank_env
from umbra.executor.config.load import model_folder
from umbra.executor.engine.schedule.request import Event, Request, SamplingParams
from umbra.executor.launch.preflight import check_ready
from umbra.executor.model_runner import make_runner
from umbra.executor.plan.resolve import resolve
from umbra.executor.run.defaults import CALLING, open_case
from umbra.executor.run.report import Completion
from umbra.flags import settings_of
from umbra.models.tokenizers import tokenizer_in
from umbra.text.answer import Answer, Part, Reader
from umbra.text.chat import Chat, Message
from umbra.text.stops import Stops
from umbra.text.tokenizer import ChatPrompt

Prompt = str | Sequence[int] | Sequence[Message] | Chat


@dataclass(frozen=True)
class Reply(Completion):
    """A completion that was read, in the format that the model's chat template speaks or the case names."""

    answer: Answer

    @property
    def outputs(self) -> "tuple[Reply]":
        """The reply itself, where programs for vLLM look for it: `reply.outputs[0].text`."""
        return (self,)


class LLM:
    """Requests of several callers run together: the loop steps only while a caller waits for tokens."""

    def __init__(self, model: str | Path | Case, **settings: object):
        """`model` is the name of a case in yaml_configs/, the path of a case, or a checkpoint (its folder, its GGUF
        file or its name on a hub), for which settings are chosen and printed. `settings` override keys of the case
        (docs/config.md), by their names, as `**{"section.key": value}`, or by the names of vLLM and SGLang, as
        `max_model_len` (docs/serving.md)."""
        case = model if isinstance(model, Case) else open_case(str(model), CALLING, settings=settings_of(settings))
        if case.world_size != 1:
            raise UserError(
                f"case {case.name}: world_size: {case.world_size}: this runs on one rank: choose another case, or "
                f"start all ranks with bash infer.sh {case.name}"
            )
        check_ready(case)
        case = resolve(case)
        self.case, self.runner = case, make_runner(case, WORK / "results", rank_env())
        vocabulary, template = self.runner.config.vocab_size, case.model_config.chat_template
        self.tokenizer = tokenizer_in(model_folder(case), vocabulary, template)
        self.runner.setup()
        self.loop = self.runner.loop
        self._events: dict[int, deque[Event]] = {}  # request id -> events that its caller has not taken yet

    def default_sampling(self, index: int = 0) -> SamplingParams:
        """The sampling settings of the case for prompt `index`, each of which has its own seed."""
        return self.runner.request(index, [], self.case.data_config.max_new_tokens).sampling

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Reply]:
        """Returns one reply for each prompt, in their order. At most `batch_size` prompts of the case run together.

        A prompt is a text, token ids, a chat as messages {"role": ..., "content": ...}, or a `Chat`, which may have
        tools. `sampling` is one for all prompts or one for each; None: as the case says. If any prompt cannot run, none
        is run. A text ends before the first of the strings `stop` (one or several), as it does in the other methods.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts: {prompts!r:.40} is one text: give a list of prompts")
        stop = stop_strings(stop)
        if sampling is None:
            settings = [self.default_sampling(i) for i in range(len(prompts))]
        else:
            settings = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(settings) != len(prompts):
            raise UserError(f"sampling: {len(settings)} settings for {len(prompts)} prompts: give one for each, or one")
        ids, encoded = [], []
        try:
            for prompt, params in zip(prompts, settings, strict=True):
                encoded.append(self._encoded(prompt))
                ids.append(self._submit(encoded[-1], params))
        except UserError:
            for id in ids:
                self._end(id)
            raise
        replies = []
        try:
            for prompt, tokens, id in zip(prompts, encoded, ids, strict=True):
                texts, events = zip(*self._texts(id, stop), strict=True)
                new = [token for event in events for token in event.tokens]
                pieces, shown = [*chain(*texts)], prompt if isinstance(prompt, str) else ""
                answer = self._parser(tokens.ids, prompt).whole(*pieces, cut=events[-1].finish_reason == "length")
                replies.append(Reply(shown, "".join(pieces), new, events[-1].finish_reason, answer))
        finally:
            for id in ids:
                self._end(id)
        return replies

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Reply]:
        """Returns one reply to a conversation, or one to each of several, as `generate` does."""
        chats = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([Chat(cast(Sequence[Message], chat)) for chat in chats], sampling, stop)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Yields the text piece by piece, as its tokens are made. Closing the iterator aborts the request. Several
        streams of one LLM run together."""
        stops = stop_strings(stop)
        return self._pieces(self._submit(self._encoded(prompt), sampling or self.default_sampling()), stops)

    def parts(
        self, prompt: Prompt, sampling: SamplingParams | None = None, stop: Sequence[str] = ()
    ) -> Generator[Part, None, None]:
        """Like `stream`, but yields reasoning, content and tool calls as they become certain (docs/text.md)."""
        encoded, stops = self._encoded(prompt), stop_strings(stop)
        pieces = self._pieces(self._submit(encoded, sampling or self.default_sampling()), stops)
        return _read(pieces, self._parser(encoded.ids, prompt))

    def parser(self, prompt: Prompt) -> Reader:
        """The parser of the answer to `prompt`."""
        return self._parser(self.encode(prompt), prompt)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or a chat; token ids are returned as they are."""
        return self._encoded(prompt).ids

    def _encoded(self, prompt: Prompt) -> ChatPrompt:
        if isinstance(prompt, str):
            if self.case.model_config.tokenizer_mode == "chat":
                return self.tokenizer.chat_prompt(Chat([{"role": "user", "content": prompt}]))
            return ChatPrompt(self.tokenizer.encode(prompt, chat=False), ())
        if isinstance(prompt, Chat):
            return self.tokenizer.chat_prompt(prompt)
        if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
            return ChatPrompt(list(cast(Sequence[int], prompt)), ())
        if all(isinstance(part, dict) for part in prompt):
            return self.tokenizer.chat_prompt(Chat(cast(Sequence[Message], prompt)))
        raise UserError(f"prompt: {prompt!r:.60} is neither a text nor token ids nor a list of messages")

    def check_chat(self) -> None:
        """Refuses a model without a chat template."""
        self.tokenizer.encode("Hello", chat=True)

    def shortened(self, messages: list[Message]) -> list[Message]:
        """The messages without the oldest turns that do not fit `input_max_len`; the last one always stays."""
        while len(messages) > 1 and len(self.encode(messages)) > self.case.data_config.input_max_len:
            print("(the oldest turn is forgotten: the conversation is longer than input_max_len)")
            messages = messages[2:]
        return messages

    def _parser(self, ids: list[int], prompt: Prompt) -> Reader:
        settings = self.case.model_config
        tools, begun = (prompt.tools, prompt.begun) if isinstance(prompt, Chat) else ((), "")
        format = self.tokenizer.format(settings.output_format)
        return self.tokenizer.reader(format, ids, tools, settings.reasoning == "split", begun)

    def _submit(self, prompt: ChatPrompt, sampling: SamplingParams) -> int:
        room = self.case.max_sequence_length - len(prompt.ids)
        if 0 < room < sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=room)  # it then ends with finish_reason "length"
        id = self.loop.submit(Request(tuple(prompt.ids), sampling, branches=prompt.branches)).id
        self._events[id] = deque()
        return id

    def _follow(self, id: int) -> Iterator[Event]:
        """Yields the events of a request until it has ended; steps the loop while there are none."""
        events = self._events[id]
        while True:
            while not events:
                for event in self.loop.step():
                    if event.id in self._events:
                        self._events[event.id].append(event)
            event = events.popleft()
            yield event
            if event.finish_reason:
                return

    def _texts(self, id: int, stop: Sequence[str]) -> Iterator[tuple[list[str], Event]]:
        """Yields the pieces of text and the event of each step of a request, up to the first of the strings `stop`."""
        detokenizer, stops = self.tokenizer.detokenizer(), Stops(stop)
        for event in self._follow(id):
            ended = event.finish_reason == "stop" and event.tokens[-1] in self.loop.stop_ids
            texts = stops.pieces(detokenizer.pieces(event.tokens[:-1] if ended else event.tokens))
            if event.finish_reason:
                texts += [*stops.pieces([detokenizer.rest()]), stops.finish()]
            yield texts, event._replace(finish_reason="stop") if stops.stopped else event
            if stops.stopped:
                return

    def _pieces(self, id: int, stop: Sequence[str]) -> Generator[str, None, None]:
        try:
            for texts, _ in self._texts(id, stop):
                yield from filter(None, texts)
        finally:
            self._end(id)

    def _end(self, id: int) -> None:
        """Abort the request if it still runs, and drop its events."""
        self.loop.abort(id)
        self._events.pop(id, None)


def stop_strings(stop: Sequence[str]) -> Sequence[str]:
    """`stop`, which is one string or several. Raises UserError for others."""
    stops = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) and text for text in stops):
        raise UserError(f"stop: {stop!r:.60} must be a string or several, none of them empty")
    return stops


def _read(pieces: Generator[str, None, None], parser: Reader) -> Generator[Part, None, None]:
    with closing(pieces):
        for piece in pieces:
            yield from parser.push(piece)
        yield from parser.finish()
