"""Renders chat templates, which are programs of a checkpoint's author, in a process with bounds of time and memory.

They run in jinja2's sandbox, as in transformers, which defines what they see. The sandbox does not bound how long they
run or how much memory they take. This module, run as a program, is that process; it imports only jinja2.
"""

import bisect
import json
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from umbra.base.errors import UserError
from umbra.text.sandbox import Ended, Sandbox, limit_memory, read, write

SECONDS = 1.0  # of a processor, for one conversation
MEMORY = 1 << 29  # bytes besides the program's own; a conversation of 8 MB takes a third
LONGER, LONGEST = 4, 1 << 20  # a text may be as many times as long as what it is made from, and this much longer
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB"
GOOD, BAD = b"+", b"-"  # what an answer begins with
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, the one that templates read first


class Rendered(NamedTuple):
    """A conversation as text, up to where the next answer begins."""

    text: str
    beginning: int  # first characters, which conversations with the same system prompt and tools have; 0: unknown
    generation_prompt: int  # last characters, which follow the last message; 0: unknown


class Renderer:
    """Renders templates, one at a time."""

    def __init__(self) -> None:
        self._sandbox = Sandbox("umbra.text.template")
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any]) -> Rendered:
        """Raises UserError if the template fails, or takes too much time or memory."""
        try:
            question = json.dumps([template, variables], default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise failed(str(error)) from None
        with self._lock:
            answer = self._ask(question)
        if answer[:1] != GOOD:
            raise failed(answer[1:].decode())
        beginning, generation_prompt, text = answer[1:].split(b" ", 2)
        return Rendered(text.decode("utf-8", "surrogatepass"), int(beginning), int(generation_prompt))

    def _ask(self, question: bytes) -> bytes:
        for _ in range(2):
            try:
                return self._sandbox.ask(question)
            except Ended as error:
                if error.status != -signal.SIGKILL:  # somebody has killed it
                    return BAD + (TOO_MUCH if error.status == -signal.SIGPROF else "it crashed").encode()
        raise RuntimeError("the process that renders chat templates does not stay alive")


def failed(why: str) -> UserError:
    return UserError(f"the checkpoint's chat template failed: {' '.join(why.split())[:300]}")


def variables_of(messages: list[dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that a template sees: `settings`, and the messages without empty fields but contents and with
    their reasoning under each of its names."""
    seen = []
    for message in messages:
        there = {key: value for key, value in message.items() if value is not None or key == "content"}
        thoughts = next((there[name] for name in REASONING if name in there), None)
        more = {} if thoughts is None else {"reasoning_content": thoughts}
        seen.append(({"thinking": thoughts} if more else {}) | there | more)
    return {**settings, "messages": seen, "documents": None, "add_generation_prompt": True}


class Generation(Extension):
    """{% generation %} marks what the model has said; here it is a part like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainNamespace(Namespace):
    """Without names that Python has a meaning for."""

    def __init__(*args: Any, **more: Any) -> None:
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **more).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def _complain(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _complain,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": PlainNamespace,
        "dict": lambda *given, **more: dict(*given, **more),
    }
    return environment


def main() -> None:
    environment = sandbox()
    compiled = lru_cache(4)(environment.from_string)
    limit_memory(MEMORY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing is written
    while True:
        try:
            question = read(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        answer = _answer(compiled, question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sys.stdout.buffer, answer)


def _answer(compiled: Any, question: bytes) -> bytes:
    try:
        source, variables = json.loads(question)
        template: Template = compiled(source)
        text = template.render(variables)
        if len(text) > LONGER * len(question) + LONGEST:
            return BAD + f"it makes {len(text)} characters of {len(question)}".encode()
        bounds = _beginning(template, variables, text), _generation_prompt(template, variables, text)
        return GOOD + b"%d %d " % bounds + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return BAD + TOO_MUCH.encode()
    except Exception as error:  # whatever the template provokes
        return BAD + str(error)[:1000].encode(errors="replace")


def _beginning(template: Template, variables: dict[str, Any], text: str) -> int:
    """The number of first characters of `text` that come before the first question; 0: the template does not say."""
    try:
        messages = variables["messages"]
        first = next(i for i, message in enumerate(messages) if message["role"] not in ("system", "developer"))
        asked = [*messages[:first], {"role": "user", "content": ""}]
        other = template.render({**variables, "messages": asked})
    except Exception:  # `text` is good all the same
        return 0
    return bisect.bisect_left(range(1, len(other) + 1), True, key=lambda count: not text.startswith(other[:count]))


def _generation_prompt(template: Template, variables: dict[str, Any], text: str) -> int:
    """The number of last characters of `text` that the template adds to the messages; 0: it does not say."""
    if not variables.get("add_generation_prompt"):
        return 0
    try:
        without = template.render({**variables, "add_generation_prompt": False})
    except Exception:  # `text` is good all the same
        return 0
    return len(text) - len(without) if text.startswith(without) else 0


if __name__ == "__main__":
    main()
