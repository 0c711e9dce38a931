"""A chat at the terminal: `umbra chat CASE`."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from umbra.executor.config.case import Case
from umbra.executor.config.load import model_folder
from umbra.llm import LLM
from umbra.text.answer import Answer, Part
from umbra.text.chat import Message
from umbra.text.tokenizer_file import has_chat_template, no_template

HELP = (
    "Ctrl-C stops an answer, and ends at an empty prompt if typed twice; /clear forgets the conversation; /help shows "
    "this line; Ctrl-D or /exit ends."
)


def chat(case: Case) -> None:
    """Chat with the model of a case until the user ends the chat. Each answer sees the conversation so far."""
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history for `input`)
    if not (case.model_config.chat_template or has_chat_template(model_folder(case))):
        raise no_template(model_folder(case))  # before weights are loaded
    llm = LLM(case)
    llm.check_chat()
    print(f"\n{HELP}\n")
    history: list[Message] = []
    interrupted = False  # the line before was Ctrl-C
    while True:
        try:
            line, interrupted = input("> ").strip(), False
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            print("(Ctrl-C once more, Ctrl-D or /exit ends)")
            interrupted = True
            continue
        except EOFError:
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line in ("/clear", "/new"):
            history = []
            print("(the conversation is forgotten)\n")
        elif line == "/help":
            print(f"{HELP}\n")
        elif line.startswith("/") and line.split()[0][1:].isalpha():
            print(f"unknown command {line:.40}, see /help\n")
        elif line:
            history = llm.shortened([*history, {"role": "user", "content": line}])
            history.append(_answer(llm, history))


def _answer(llm: LLM, history: list[Message]) -> Message:
    """Print the answer piece by piece while it is generated, its reasoning dimmed, and return it as a message."""
    shown: list[Part] = []
    with _interrupts() as interrupted:
        parser, stream = llm.parser(history), llm.stream(history)
        for piece in stream:
            _show(parser.push(piece), shown)
            if interrupted:
                stream.close()
                break
        _show(parser.finish(), shown)
    print(" [stopped]\n" if interrupted else "\n")
    return Answer.of(shown).message()


def _show(parts: list[Part], shown: list[Part]) -> None:
    """Print `parts` and append them to `shown`, those before them."""
    for part in parts:
        if shown and shown[-1].kind != part.kind:
            print("\n")
        dimmed = part.kind == "reasoning" and sys.stdout.isatty()
        print(f"\033[2m{part.text}\033[0m" if dimmed else part.text, end="", flush=True)
        shown.append(part)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising it, so that no step of the engine is cut off half-way."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
