"""A model in this process: text in, text out, on one rank.

from umbra import LLM, SamplingParams
llm = LLM("demo")
for out in llm.generate(["Emma was"], SamplingParams(max_tokens=20, temperature=0.8, seed=1)):
    print(out.text)
for piece in llm.stream("Emma was"):
    print(piece, end="")
"""

from collections.abc import Generator, Sequence
from pathlib import Path

from executor.engine.request import SamplingParams
from text.parser import Part
from umbra.answers import Reply
from umbra.session import Prompt, Session


class LLM:
    def __init__(self, model: str | Path, **settings: object):
        """`model` is the name of a case in yaml_configs/, the path of a case, or the folder of a checkpoint, for which
        sensible settings are chosen and printed. `settings` override keys of the case (docs/config.md), by their names
        or as `**{"section.key": value}`."""
        self.session = Session.open(str(model), settings)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Reply]:
        """Returns one reply for each prompt, in their order. At most `batch_size` prompts of the case run
        together.

        A prompt is a text, token ids, a chat as messages {"role": ..., "content": ...}, or a `Chat`, which may have
        tools. `sampling` is one for all prompts or one for each; None: as the case says. If any prompt cannot run, none
        is run. A text ends before the first of the strings `stop` (one or several), as it does in the other methods.
        """
        return self.session.generate(prompts, sampling, stop)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Yields the text piece by piece, as its tokens are made. Closing the iterator ends the request. Several
        streams of one LLM run together."""
        return self.session.stream(prompt, sampling, stop)

    def parts(
        self, prompt: Prompt, sampling: SamplingParams | None = None, stop: Sequence[str] = ()
    ) -> Generator[Part, None, None]:
        """Like `stream`, but yields reasoning, content and tool calls (docs/text.md)."""
        return self.session.parts(prompt, sampling, stop)
