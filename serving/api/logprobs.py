"""Log-probabilities in the shapes of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

from umbra.executor.engine.schedule.request import TokenLogprob
from umbra.serving.api.front import Text
from umbra.serving.api.streams import Token

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, text: Text):
        self.bytes_of = text.tokenizer.token_bytes

    def name(self, id: int) -> str:
        """The token's text; one that is no text by itself is written as its bytes."""
        return name_of(self.bytes_of(id))


def name_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Sequence[Token], names: TokenTexts) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        data = names.bytes_of(id)
        return {"token": name_of(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    content = [
        {**entry(t.id, t.logprobs.logprob), "top_logprobs": [entry(*other) for other in t.logprobs.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Collects the four lists of a completion's log-probabilities."""

    def __init__(self, names: TokenTexts, wanted: int):
        self.names, self.wanted = names, wanted

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        """The log-probabilities of an echoed prompt. `logprobs` has those of its tokens from the second on; the first
        has none."""
        top = [None, *(self._top(f) for f in logprobs)]
        values = [None, *(max(f.logprob, LEAST) for f in logprobs)]
        return self._lists([self.names.name(id) for id in ids], values, top, offsets)

    def tokens(self, tokens: Sequence[Token], before: int) -> dict[str, Any]:
        """The log-probabilities of generated tokens. `before` is the number of characters before the answer."""
        names, values = [self.names.name(t.id) for t in tokens], [max(t.logprobs.logprob, LEAST) for t in tokens]
        top = [self._top(t.logprobs) for t in tokens]
        return self._lists(names, values, top, [before + t.start for t in tokens])

    def _top(self, values: TokenLogprob) -> dict[str, float]:
        return {self.names.name(token): max(logprob, LEAST) for token, logprob in values.top}

    def _lists(
        self,
        names: list[str],
        values: Sequence[float | None],
        top: Sequence[dict[str, float] | None],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        return {
            "text_offset": list(offsets),
            "token_logprobs": list(values),
            "tokens": names,
            "top_logprobs": list(top) if self.wanted else None,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The lists of all `parts`, one after the other."""
    whole = dict(parts[0])
    for part in parts[1:]:
        whole = {key: None if value is None else value + part[key] for key, value in whole.items()}
    return whole
