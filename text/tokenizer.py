"""Text to token ids and back, with the tokenizer, chat template and end-of-sequence ids of the checkpoint."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from umbra.base.errors import UserError
from umbra.text.answer import Answer, Reader, ToolCall
from umbra.text.chat import CallShape, Chat, SystemShape, for_harmony, numbered, one_call_each, with_systems
from umbra.text.conventions import Conventions
from umbra.text.formats import CHANNEL, MESSAGE, THINK, THINK_END, Mark, OutputMarks
from umbra.text.parser import reader
from umbra.text.template import TOO_MUCH, Renderer, failed, variables_of
from umbra.text.token_bytes import bytes_of_tokens
from umbra.text.tokenizer_file import no_template, read_template
from umbra.text.tokenizer_record import read_record
from umbra.text.tokenizer_sandbox import Encoder, is_linear
from umbra.text.tool_prompt import renders_tools, with_tools

CONTEXT = 6  # tokens of a prompt that decide how the text after them begins
HALF = "\ufffd"  # stands for a part of a character
LONGEST_HELD = 64  # tokens without a whole character at their end; text is then given as it is, to bound the work
LONGEST_TOKEN = 4096  # characters of one
# A tokenizer that fails should fail when it is loaded.
TRIED = "A text, of 3 lines:\n\n  d\u00e9j\u00e0 vu \u65e5\u672c\u8a9e \U0001f642"
LONGEST_GENERATION_PROMPT = 1024  # characters; those of published models have less than 100
PROBED = (False, ""), (True, ""), (False, "umbra_said")  # whether there is no content, and what it is
BEGUN = "umbra_begun_answer"  # stands for an answer that is begun while its conversation is rendered
ASKED = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
TAIL = 16  # tokens in which an opening mark of reasoning and a few line breaks have room, also letter by letter


class ChatPrompt(NamedTuple):
    """A conversation up to where the next answer begins."""

    ids: list[int]
    # Numbers of first ids after which others probably differ (executor/engine/schedule/request.py).
    branches: tuple[int, ...]


class Tokenizer:
    def __init__(self, folder: Path, conventions: Conventions, vocabulary: int | None = None, template: str = ""):
        """Reads the tokenizer in `folder`. Ids from `vocabulary` on are refused: the model has no embedding for them.
        `template` is a file with the chat template to use in place of the checkpoint's."""
        self.folder, self.conventions, self.vocabulary = folder, conventions, vocabulary
        # One text at a time is encoded, for which the library would start a thread for each core. If the system refuses
        # one, it panics.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Backend  # imported only where text is used

        with self._failures("not readable"):
            self.record = read_record(folder, conventions)
            self.backend = Backend.from_str(self.record.backend)
            added = self.backend.get_added_tokens_decoder().items()
            self._encoder = None if is_linear(self.backend, conventions.expressions) else Encoder(self.record.backend)
        self._templates = read_template(template) if template else self.record.chat_template
        self.longest_token = max(map(len, self.backend.get_vocab()), default=0)
        if self.longest_token > LONGEST_TOKEN:
            raise UserError(f"{folder}: a token has {self.longest_token} characters, more than {LONGEST_TOKEN}")
        special = {token.content: id for id, token in added if token.special}
        # Tokens that a grammar (executor/engine/schedule/grammar.py) takes for more than their letters.
        self.atoms = {t.content: id for id, t in added if t.special or (t.content[:1] == "<" and t.content[-1:] == ">")}
        self._added = frozenset(id for id, _ in added)
        self._bytes_of = bytes_of_tokens(self.backend)
        self._by_tokens = conventions.format_of_tokens(special)
        self.marks = {special[token]: Mark(token) for token in (self._by_tokens.tokens if self._by_tokens else ())}
        # Tokenizers differ in whether they call the marks of reasoning and tool calls special; a parser needs them.
        shown = conventions.tags.union(self.marks.values()).difference(self._by_tokens.ends if self._by_tokens else ())
        self.hidden = frozenset(id for token, id in special.items() if token not in shown)
        self._renderer = Renderer()
        self._shapes: dict[str, CallShape] = {}  # of templates
        self._systems: dict[str, SystemShape] = {}
        self._beginning: tuple[str, list[int]] = "", []  # of the last conversation, and its ids
        self.decode(self.encode(TRIED, chat=False))

    @property
    def template(self) -> str:
        """The text of the chat template; of several that have names, all. Empty: there is none."""
        templates = self._templates
        return "\n".join(templates.values()) if isinstance(templates, dict) else templates

    def format(self, setting: str) -> OutputMarks | None:
        """Returns the format that `setting` names; for `auto` one whose signs are in the chat template and whose tokens
        the tokenizer has. None: plain text."""
        if setting != "auto":
            format = self.conventions.formats.get(setting)
            if format and format.tokens and format is not self._by_tokens:
                raise UserError(
                    f"model_config.output_format: {setting}: {self.folder}: its tokenizer has not all of the special "
                    f"tokens {' '.join(format.tokens)}: choose auto"
                )
            return format
        return self.conventions.format_of_template(self.template, self._by_tokens)

    @contextlib.contextmanager
    def _failures(self, what: str = "failed") -> Iterator[None]:
        """Makes a UserError of whatever the files provoke the library to raise."""
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            # What Rust calls a panic is no Exception, so that it ends a program.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{self.folder}: tokenizer {what}: {' '.join(str(error).split())[:300]}") from None

    def encode(self, prompt: str, chat: bool, special: bool = True) -> list[int]:
        """The token ids of `prompt`; with `chat`, of a conversation in which it is the user's first turn. `special`:
        let the tokenizer add its special tokens (such as BOS)."""
        if chat:
            return self.encode_chat(Chat([{"role": "user", "content": prompt}]))
        return self._ids(prompt, special)

    def encode_chat(self, chat: Chat) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template, up to where the next answer begins."""
        return self.chat_prompt(chat).ids

    def chat_prompt(self, chat: Chat) -> ChatPrompt:
        """The same, with the end of the system prompt and of the last message."""
        if not self._templates:
            raise no_template(self.folder)
        if not chat.messages:
            raise failed("there are no messages")
        tools = list(chat.tools) or None
        settings = {**self.record.special_tokens, **chat.settings, "tools": tools}
        template = self._template_for(tools is not None)
        called = not self._by_tokens and any(message.get("tool_calls") for message in chat.messages)
        messages = self._with_systems(chat.for_template(self._shape(template) if called else CallShape()), template)
        format = self.format("auto")
        if chat.tools and format and self.describes_tools(format):
            messages = with_tools(messages, chat.tools, format)
        if chat.continued:
            messages[-1]["content"] = BEGUN
        variables = variables_of(self._for_format(messages, format), settings)
        variables["add_generation_prompt"] = not chat.continued
        if self._by_tokens:
            variables |= for_harmony(variables["messages"], chat.tools)
        text, beginning, added = self._renderer.render(template, variables)
        if chat.continued:
            if BEGUN not in text:
                raise failed("it does not show the answer that is begun")
            text = text[: text.rindex(BEGUN)] + chat.begun
        ids = self._ids(text, special=False)
        first, end = self._first_ids(ids, text[:beginning]), len(ids) - self._last_ids(ids, text[len(text) - added :])
        return ChatPrompt(ids, tuple(count for count in (first, end) if 0 < count < len(ids)))

    def _for_format(self, messages: list[dict[str, Any]], format: OutputMarks | None) -> list[dict[str, Any]]:
        """Returns `messages` with calls as templates of `format` want them."""
        if format and format.alone:
            messages = one_call_each(messages)
        return numbered(messages, format.short_ids) if format and (format.numbered or format.short_ids) else messages

    def describes_tools(self, format: OutputMarks) -> bool:
        """Returns whether conversations with tools get a description of them, because the chat template renders calls
        in `format` and their results, but no tools."""
        return not renders_tools(self.template) and not (format.parameter or format.tokens or format.quote)

    def _with_systems(self, messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Returns `messages` with system messages only where `template` renders them."""
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if first < 2 and all(message["role"] != "system" for message in messages[first:]):
            return messages
        if template not in self._systems:
            system = {"role": "system", "content": "umbra_other"}
            leading: list[dict[str, Any]] = [{"role": "system", "content": "x"}, system, *ASKED[:1]]
            self._systems[template] = SystemShape(
                *("umbra_other" in self._rendered(template, turns) for turns in (leading, [*ASKED, system, *ASKED[:1]]))
            )
        return with_systems(messages, self._systems[template])

    def _template_for(self, tools: bool) -> str:
        """Returns the template of conversations with or without `tools`, by the names that transformers knows."""
        templates = self._templates
        if isinstance(templates, str):
            return templates
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates:
            raise failed(f"of several templates ({', '.join(templates)}) none is called default: give one by its file")
        return templates[name]

    def _shape(self, template: str) -> CallShape:
        """Returns the form in which `template` takes tool calls. It is found once, by rendering small conversations."""
        if template not in self._shapes:
            shape = CallShape()
            for text in (False, True):
                empty, none, said = (self._probed(template, CallShape(text, none), said) for none, said in PROBED)
                if empty or none:
                    fewer = bool(none) and (not empty or len(none) < len(empty))  # empty content adds something
                    in_turn = said and "umbra_said" in said.partition("umbra_name")[0]
                    shape = CallShape(text, fewer, fewer and not in_turn)
                    break
            self._shapes[template] = shape
        return self._shapes[template]

    def _probed(self, template: str, shape: CallShape, said: str) -> str:
        """A conversation with a call as `template` renders it; empty if it fails or the call is not there in JSON."""
        call = ToolCall("umbra_name", '{"umbra_key": 1}', "functions.umbra_name:0")
        answer = Answer(content=said, tool_calls=(call,)).message()
        chat = Chat(
            [{"role": "user", "content": "x"}, answer, {"role": "tool", "tool_call_id": call.id, "content": "x"}]
        )
        text = self._rendered(template, chat.for_template(shape))
        return text if "umbra_name" in text and "umbra_key" in text and "'umbra_key'" not in text else ""

    def _rendered(self, template: str, messages: list[dict[str, Any]]) -> str:
        """A small conversation as `template` renders it; empty if it fails."""
        try:
            called = self._for_format(messages, self.format("auto"))
            variables = variables_of(called, {**self.record.special_tokens, "tools": None})
            return self._renderer.render(template, variables).text
        except UserError as error:
            if TOO_MUCH in str(error):
                raise  # at once: others would take as long
            return ""

    def _first_ids(self, ids: list[int], text: str) -> int:
        """The number of first `ids` that `text` begins with."""
        if text != self._beginning[0]:  # conversations begin alike
            self._beginning = text, self._ids(text, special=False)
        pairs = zip(ids, self._beginning[1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _last_ids(self, ids: list[int], text: str) -> int:
        """The number of last `ids` that are those of `text`; 0: no token begins where it does, or it is long."""
        own = self._ids(text, special=False) if len(text) <= LONGEST_GENERATION_PROMPT else []
        return len(own) if own == ids[len(ids) - len(own) :] else 0

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends with an open mark of reasoning, so that the answer begins within it."""
        return self._ends_with(ids, THINK, *(format.think for format in self.conventions.formats.values()))

    def ends_reasoning(self, ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends with a mark that closes reasoning, so that the answer has none."""
        return self._ends_with(ids, THINK_END, *(format.think_end for format in self.conventions.formats.values()))

    def _ends_with(self, ids: Sequence[int], *marks: str) -> bool:
        return self.whole_text([*ids[-TAIL:]]).rstrip().endswith(marks)

    def reader(
        self,
        format: OutputMarks | None,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        split: bool = True,
        begun: str = "",
    ) -> Reader:
        """Returns the reader of the answer to `prompt`, which may end within or after reasoning, or with the text of
        the answer that is `begun`."""
        answer = reader(format, tools, self.opens_reasoning(prompt), split)
        if format and format.tokens:
            begin = [Mark(CHANNEL), "final", Mark(MESSAGE), begun] if begun else []
        else:
            closing = format.think_end if format else THINK_END
            begin = [closing if self._ends_with(prompt, closing) else "", begun]
        for text in filter(None, begin):
            answer.push(text)
        return answer

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"the prompt {text!r:.40} has half of a surrogate pair: not text") from None
        with self._failures():
            if self._encoder:
                ids = self._encoder.ids(text, special)
            else:
                ids = list(self.backend.encode(text, add_special_tokens=special).ids)
        if self.vocabulary is not None and ids and max(ids) >= self.vocabulary:
            raise UserError(
                f"{self.folder}: its tokenizer gives {max(ids)}, outside vocab_size {self.vocabulary}: tokenizer and "
                "config.json are not of one checkpoint"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, without special tokens other than the marks of reasoning and tool calls."""
        shown = [id for id in ids if id not in self.hidden]
        return self.whole_text(shown)

    def whole_text(self, ids: list[int]) -> str:
        """The text of `ids`, with all special tokens."""
        with self._failures():
            return str(self.backend.decode(ids, skip_special_tokens=False))

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; the name of a special token; none of an id that is no token."""
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        return token.encode() if id in self._added else self._bytes_of(token)

    def detokenizer(self, prompt: Sequence[int] = (), whole: bool = False) -> "Detokenizer":
        """For the tokens that follow `prompt`. `whole`: special tokens are text."""
        return Detokenizer(self, prompt, whole)


class Detokenizer:
    """Text piece by piece as tokens come: a piece is given once no later token can change it.

    Each token is decoded together with a few before it, which decide how its text begins, and with those since the last
    whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), whole: bool = False):
        self.tokenizer, self._hidden = tokenizer, frozenset() if whole else tokenizer.hidden
        self._decode = tokenizer.whole_text if whole else tokenizer.decode
        self._pending: list[int] = []  # shown tokens since the text last ended with a whole character
        self._given = 0  # characters of their text that were given
        before = [id for id in prompt[-CONTEXT:] if id not in self._hidden]
        self._start([] if self._decode(before).endswith(HALF) else before)

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain after `tokens`, beyond what was given before; often empty."""
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """The same in pieces: texts, and marks that are tokens."""
        pieces: list[str] = []
        for token in tokens:
            if mark := self.tokenizer.marks.get(token):
                pieces += [self.rest(), mark]
                self._start([token])
            elif token not in self._hidden:
                pieces.append(self._push(token))
        return [piece for piece in pieces if piece]

    def rest(self) -> str:
        """Returns what is left at the end, such as half of a character."""
        text = self._text()[self._given :]
        self._start([])
        return text

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text, given = self._text(), self._given
        if not text.endswith(HALF) or len(self._pending) > LONGEST_HELD:
            self._start([] if text.endswith(HALF) else self._pending[-CONTEXT:])
            return text[given:]
        self._given = max(given, len(text.rstrip(HALF)))
        return text[given : self._given]

    def _text(self) -> str:
        return self._decode([*self._before, *self._pending])[self._skipped :]

    def _start(self, before: list[int]) -> None:
        """Starts again after the tokens `before`."""
        self._before, self._skipped, self._pending, self._given = before, len(self._decode(before)), [], 0
