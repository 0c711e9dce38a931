"""The requests of a soak: questions whose answers are known beforehand, wrong requests, and how each is asked."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LONGEST, NEW = 1984, 64  # tokens of a prompt and of an answer; the demo's model has 2,048 positions
VOCABULARY = range(16, 4000)  # ids of the demo's vocabulary that are neither special nor at its end
NAMES = ["Emma", "Harriet", "Jane", "Anne", "Fanny", "Catherine", "Elinor", "Marianne", "Lydia", "Charlotte", "Mary"]
PLACES = ["Bath", "London", "Highbury", "Meryton", "Lyme", "Hartfield", "Pemberley", "Rosings", "Norland", "Barton"]
DEEDS = ["dance", "walk", "read", "write", "sing", "draw", "ride", "travel", "dine", "wait", "laugh", "play", "sew"]
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9}
GRAMMARS: list[dict[str, Any]] = [{"guided_regex": "(yes|no)( (yes|no)){3,9}"}, {"guided_json": FLAGS}]
KINDS = {  # and how many of a hundred questions are of each
    "ids": 20,
    "text": 12,
    "prefix": 14,
    "quote": 10,
    "chat": 20,
    "sampled": 14,
    "choices": 3,
    "stop": 3,
    "grammar": 2,
    "long": 1,
    "wide": 1,
}
COMMON = 4, 160  # beginnings that several prompts have, and tokens of each
WIDE = {"n": 4, "logprobs": 20, "max_tokens": NEW, "ignore_eos": True, "temperature": 1.0}  # more than sockets keep


@dataclass(frozen=True)
class Question:
    """`body` is that of the first API of `apis`, which is the one it is asked with when it is alone."""

    key: int
    kind: str
    apis: tuple[str, ...]
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def most(self) -> int:
        """Most tokens of all its answers."""
        return int(self.body["max_tokens"]) * self.choices

    def asked(self, api: str) -> dict[str, Any]:
        """The body of a request for it with another one of its APIs."""
        if api == self.apis[0]:
            return dict(self.body)
        body = {"temperature": self.body["temperature"]}
        if api == "messages":
            return body | {"max_tokens": self.body["max_tokens"], "messages": self.body["messages"]}
        said = self.body["messages"][0]["content"]
        return body | {"max_output_tokens": self.body["max_tokens"], "input": said, "store": False}


def questions(number: int, seed: int) -> list[Question]:
    draw = random.Random(seed)
    common = [draw.choices(VOCABULARY, k=COMMON[1]) for _ in range(COMMON[0])]
    kinds = list(_spread(number))
    return [_question(draw, key, kind, common) for key, kind in enumerate(kinds)]


def _spread(number: int) -> Iterator[str]:
    """Kinds in the shares of KINDS; each at least once."""
    yield from KINDS
    draw = random.Random(0)
    yield from draw.choices(list(KINDS), list(KINDS.values()), k=max(0, number - len(KINDS)))


def _question(draw: random.Random, key: int, kind: str, common: list[list[int]]) -> Question:
    def ids(most: float) -> list[int]:
        return draw.choices(VOCABULARY, k=int(2 ** draw.uniform(2, most)))

    sampled = {"temperature": draw.choice((0.7, 1.0)), "seed": draw.randrange(1 << 30)}
    body: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(16, NEW)}
    if kind in ("chat", "choices"):
        said = {"role": "user", "content": f"{_line(draw)} {_line(draw)} No. {key}."}
        if kind == "chat":
            return Question(key, kind, ("chat", "responses", "messages"), body | {"messages": [said]})
        return Question(key, kind, ("chat",), body | sampled | {"messages": [said], "n": 2})
    if kind in ("text", "stop", "grammar"):
        body["prompt"] = f"{_line(draw)} {_line(draw)} This was letter {key}, and"
    elif kind == "prefix":
        body["prompt"] = draw.choice(common) + ids(4)
    elif kind == "quote":
        body["prompt"] = ids(5) * 3
    elif kind == "long":
        body["prompt"] = draw.choices(VOCABULARY, k=draw.randint(LONGEST // 2, LONGEST))
    else:
        body["prompt"] = ids(8)
    if kind == "stop":
        body |= {"stop": ["the", " to"]}
    elif kind == "grammar":
        body |= draw.choice(GRAMMARS)
    elif kind == "sampled":
        body |= sampled
        if draw.random() < 0.5:
            body |= {"logprobs": 1}
    elif kind == "wide":
        body |= sampled | WIDE
    elif draw.random() < 0.3:
        body |= {"ignore_eos": True}
    return Question(key, kind, ("completions",), body)


def _line(draw: random.Random) -> str:
    name, other, town, deed = (draw.choice(words) for words in (NAMES, NAMES, PLACES, DEEDS))
    return f"Did Miss {name} of {town} {deed} with {draw.randint(2, 999)} friends of {other}?"


@dataclass(frozen=True)
class Wrong:
    """A request that the server must refuse."""

    status: int
    path: str
    body: Any = None
    raw: bytes | None = None
    method: str = "POST"


WRONG = [
    Wrong(400, "/v1/completions", {"prompt": "Emma", "guided_regex": "(" * 5}),
    Wrong(400, "/v1/completions", {"prompt": "Emma", "guided_json": {"type": "king"}}),
    Wrong(400, "/v1/completions", {"prompt": [20] * 3000}),
    Wrong(400, "/v1/completions", {"prompt": [1 << 40]}),
    Wrong(400, "/v1/completions", raw=b'{"prompt": "Emma'),
    Wrong(404, "/v1/completions", {"prompt": "Emma", "model": "mr_darcy"}),
    Wrong(400, "/v1/chat/completions", {"messages": []}),
    Wrong(400, "/v1/responses", {"input": "Hi", "store": True}),
    Wrong(400, "/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    Wrong(413, "/v1/completions", raw=b"x" * 10),  # with the length of a body of 9 MB
    Wrong(405, "/health", {}),
]
LONG_BODY = 9 << 20
