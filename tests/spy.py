"""An engine that records its steps for a test. It is called by the loop and calls the real engine."""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Any, cast

from torch import Tensor

from umbra.executor.engine.schedule.sequence import Sequence
from umbra.executor.engine.step.engine import Engine
from umbra.executor.engine.step.loop import Loop
from umbra.executor.model_runner import ModelRunner
from umbra.models.batch import Batch


class Spy:
    def __init__(
        self, engine: Engine, before_pack: Callable[[list[Sequence]], object], after: Callable[[Tensor], object]
    ):
        self.engine, self.before_pack, self.after = engine, before_pack, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def pack(self, groups: ListOf[ListOf[Sequence]], decode: bool, hidden: bool) -> Batch:
        self.before_pack([sequence for group in groups for sequence in group])
        return self.engine.pack(groups, decode, hidden=hidden)

    def forward(self, batch: Batch, decode: bool) -> Tensor:
        logits = self.engine.forward(batch, decode)
        self.after(logits)
        return logits


def spy_on(
    runner: ModelRunner,
    before_pack: Callable[[list[Sequence]], object] = lambda sequences: None,
    after: Callable[[Tensor], object] = lambda logits: None,
) -> None:
    """From now on the runner's loop calls these around every step; `before_pack` gets the step's sequences."""
    runner.loop = Loop(cast(Engine, Spy(runner.engine, before_pack, after)), runner.loop.stop_ids)
