"""A chat at the terminal: `bash infer.sh --chat CASE`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from executor.job.session import Message, Session

HELP = "Ctrl-C stops an answer; /new forgets the conversation; Ctrl-D or /quit ends."


def chat(case_name: str, overrides: list[str]) -> None:
    """Chat with the model of a case until the user ends the chat. Each answer sees the conversation so far."""
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history for `input`)
    session = Session.open(case_name, {}, overrides)
    session.check_chat()
    print(f"\n{HELP}\n")
    history: list[Message] = []
    while (line := _read()) is not None:
        if line == "/new":
            history = []
        elif line:
            history = session.shortened([*history, {"role": "user", "content": line}])
            history.append({"role": "assistant", "content": _answer(session, history)})


def _read() -> str | None:
    """The user's next line; None if the user ends the chat."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/quit" else line


def _answer(session: Session, history: list[Message]) -> str:
    """Print the answer piece by piece while it is generated, and return it."""
    pieces = []
    with _interrupts() as interrupted:
        stream = session.stream(history)
        for piece in stream:
            print(piece, end="", flush=True)
            pieces.append(piece)
            if interrupted:
                stream.close()
                print(" [stopped]", end="")
                break
    print("\n")
    return "".join(pieces)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising it, so that no step of the engine is cut off half-way."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
