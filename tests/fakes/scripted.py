"""A worker of one rank in this process, with a script in the front's place."""

import time
from typing import Any

from umbra.executor.engine.schedule.request import SamplingParams
from umbra.executor.model_runner import ModelRunner
from umbra.serving.ranks.messages import Abort, ChannelMessage, Out, Row, Stop, Submit
from umbra.serving.ranks.worker import Worker


class Script:
    """Stands for the channel: gives the worker what `messages` has, and keeps what it sends."""

    behind = False

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.sent: list[ChannelMessage] = []

    def receive(self, wait_s: float) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ChannelMessage) -> None:
        self.sent.append(message)

    def of(self, kind: type[ChannelMessage]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def rows(self, id: int) -> list[Row]:
        return [row for out in self.of(Out) for row in out.rows if row.id == id]

    def tokens(self, id: int) -> list[int]:
        return [token for row in self.rows(id) for token in row.tokens]

    def ended(self, id: int) -> bool:
        return any(row.finish for row in self.rows(id))


class Server:
    """A worker that is warm and waits for requests."""

    def __init__(self, runner: ModelRunner):
        self.script = Script()
        self.worker = Worker(runner, self.script)
        self.worker.warm_up()
        self.worker.matchers.wait()
        self.script.sent.clear()

    def submit(self, id: int, ids: list[int], tokens: int, **fields: Any) -> None:
        sampling = SamplingParams(tokens, ignore_eos=True, **fields)
        self.script.messages.append(Submit(id, ids, sampling))

    def abort(self, id: int) -> None:
        self.script.messages.append(Abort(id))

    def stop(self) -> None:
        self.script.messages.append(Stop())

    def finish(self, most: int = 5000) -> None:
        """Runs until nothing is left to do."""
        self.worker.turn()
        for _ in range(most):
            if self.worker.idle:
                return
            if self.worker.loop.idle:  # a grammar is compiled
                time.sleep(0.001)
            self.worker.turn()
        raise AssertionError("requests never end")

    def answer(self, id: int, ids: list[int], tokens: int, **fields: Any) -> list[int]:
        """The tokens of a request that runs alone."""
        self.submit(id, ids, tokens, **fields)
        self.finish()
        return self.script.tokens(id)
