"""The chat at the terminal, driven as a user drives it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from umbra import LLM
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.chat import chat
from umbra.executor.run.defaults import CHATTING, open_case
from umbra.text.chat import Message

pytestmark = pytest.mark.slow

PROGRAM = """
import signal, sys
from umbra.executor.run.defaults import CHATTING, open_case
from umbra.chat import chat
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without it
chat(open_case(sys.argv[1], CHATTING, sys.argv[2:]))
"""


class Terminal:
    def __init__(self, process: "subprocess.Popen[bytes]"):
        self.process, self.seen = process, ""

    def say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def until(self, text: str) -> str:
        """Returns what is printed up to `text`."""
        assert self.process.stdout
        while text not in self.seen:
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, f"ended before {text!r}: {self.seen}"
            self.seen += more.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before


@contextmanager
def terminal(*overrides: str) -> Iterator[Terminal]:
    command = [sys.executable, "-u", "-c", PROGRAM, "demo_chat", "keep_packed=false", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Terminal(process)
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def test_answers_come_piece_by_piece_with_history_and_ctrl_c_stops_one() -> None:
    with terminal("ignore_eos=true", "max_new_tokens=700") as user:
        assert "Ctrl-C stops an answer" in user.until("> ")
        user.say("Who is Emma?")
        user.until(" ")  # the answer has begun
        user.process.send_signal(signal.SIGINT)
        user.until(" [stopped]")
        user.until("> ")
        user.process.send_signal(signal.SIGINT)  # at the prompt it ends nothing
        user.say("")  # wakes a read that has begun just behind the signal
        user.until("(Ctrl-C once more, Ctrl-D or /exit ends)")
        user.until("> ")
        user.say("/help")
        user.until("Ctrl-C stops an answer")
        user.until("> ")
        user.say("/clear all")
        user.until("unknown command /clear all, see /help")
        user.until("> ")
        user.say("/clear")
        user.until("> ")
        user.say("And Mr. Darcy?")
        user.until(" ")
        user.process.send_signal(signal.SIGINT)
        user.until("> ")
        user.say("/exit")


def test_the_conversation_so_far_is_given_and_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM("demo_chat", input_max_len=60, max_new_tokens=20, keep_packed=False)
    history: list[Message] = []
    lengths = []
    for _ in range(6):
        history = llm.shortened([*history, {"role": "user", "content": "Who is Emma Woodhouse?"}])
        lengths.append(len(llm.encode(history)))
        history.append({"role": "assistant", "content": "".join(llm.stream(history)) or "Nobody."})
    assert lengths[1] > lengths[0]
    assert max(lengths) <= 60
    assert "the oldest turn is forgotten" in capsys.readouterr().out
    assert history[-2]["content"] == "Who is Emma Woodhouse?"


def test_a_model_without_a_chat_template_is_refused_before_the_first_line(tmp_path: Path) -> None:
    for path in (ROOT / "checkpoints" / "austen_moe").iterdir():
        if path.name == "tokenizer_config.json":
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            (tmp_path / path.name).write_text(json.dumps(settings))
        elif path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(UserError, match="has no chat template, which conversations need: --chat-template FILE"):
        chat(open_case(str(tmp_path), CHATTING))
