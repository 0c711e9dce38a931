"""A conversation of an agent with several servers: how much of each prompt they compute again.

    umbra bench conversation SERVER ... [--turns 10] [--system 2000] [--json FILE] [--plot FILE]

A SERVER is a case, which is served while its turn lasts, or NAME=URL of a server that runs: any with OpenAI's
/v1/chat/completions that says what it has cached (in `usage`, or in `timings` as llama-server does). All have the same
conversation, one after the other: a system prompt, then in each turn a question, answers with a call of a tool and the
tool's result, and a last answer. Answers go back as the servers gave them. At each new question the reasoning of the
turns before is left out: by the chat template, or, where a model has none, by the client, which leaves out half of each
answer. With `--branches` every turn is asked in so many conversations, which have only the system prompt in common.

Columns: `prompt` tokens; `prefilled`, those of them that were computed; `needed`, those that no earlier prompt with its
answer begins with, where the server can tokenize chats; `ttft_ms` to the first token.
"""

import http.client
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from umbra.base.errors import UserError, run_main
from umbra.base.files import write_whole
from umbra.text.formats import THINK, THINK_END
from umbra.tools.benchmarks import serving_peers
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

PATIENCE_S = 3600.0
WORDS = [
    "a",
    "river",
    "the",
    "old",
    "house",
    "and",
    "two",
    "men",
    "of",
    "my",
    "town",
    "with",
    "no",
    "news",
    "from",
    "her",
    "sister",
    "in",
    "spring",
    "who",
    "came",
    "to",
    "see",
    "it",
]
PROBED = 400  # words by which the tokens of a word are counted
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "list", "search")
]
Message = dict[str, Any]


@dataclass
class ServerReply:
    """The answer of a server; times are in seconds."""

    ttft: float = 0.0
    seconds: float = 0.0
    prompt: int = 0
    tokens: int = 0
    cached: int | None = None
    prefilled: int | None = None
    said: dict[str, str] = field(default_factory=lambda: {"content": "", "reasoning_content": ""})

    def take(self, event: dict[str, Any], seconds: float) -> None:
        """Reads a chunk that came after `seconds`."""
        if "error" in event:
            raise UserError(f"the answer ends with an error: {event['error']!r:.200}")
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            for name in self.said:
                self.said[name] += delta.get(name) or ""
            if not self.ttft and (any(self.said.values()) or delta.get("tool_calls") or choice.get("finish_reason")):
                self.ttft = seconds
        self.seconds = seconds
        if usage := event.get("usage"):
            self.prompt, self.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)
        if timings := event.get("timings"):
            self.prefilled = timings["prompt_n"]

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were not in the cache."""
        if self.prefilled is not None:
            return self.prefilled
        if self.cached is None:
            raise UserError("the server does not say how many tokens of a prompt it has cached")
        return self.prompt - self.cached


class Server:
    def __init__(self, name: str, url: str):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"{name}={url}: must be NAME=http://HOST:PORT")
        self.name, self._at = name, (parts.hostname, parts.port or 80)
        self._folder = parts.path.rstrip("/").removesuffix("/v1")

    def ask(self, messages: Sequence[Message], tools: Sequence[Message], most: int) -> ServerReply:
        """An answer of at most `most` tokens."""
        body = {"messages": messages, "max_tokens": most, "temperature": 0, "stream": True, "cache_prompt": True}
        body |= {"stream_options": {"include_usage": True}} | ({"tools": tools} if tools else {})
        reply, start = ServerReply(), time.perf_counter()
        with self._post("/v1/chat/completions", body) as response:
            if response.status != 200:
                raise UserError(f"{self.name}: status {response.status}: {response.read(300).decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: {"):
                    reply.take(json.loads(line[6:]), time.perf_counter() - start)
        return reply

    def ids(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The tokens of a prompt; none if the server does not tokenize chats."""
        with self._post("/tokenize", {"messages": messages, "tools": tools}) as response:
            answer = json.loads(response.read()) if response.status == 200 else {}
        return answer.get("tokens") or []

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(*self._at, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._folder + path, json.dumps(body).encode(), headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{self.name}: no answer: {error!r:.200}") from None
        finally:
            connection.close()


@dataclass(frozen=True)
class ConversationPlan:
    """The sizes of the conversation in tokens, as far as words have them."""

    turns: int
    branches: int
    calls: int  # of a tool in a turn
    system: int
    question: int
    result: int
    answer: int  # at most
    seed: int


class Conversation:
    """The client's part of it, and what it has sent and got so far. `tokens_per_word` makes words of tokens."""

    def __init__(self, plan: ConversationPlan, tokens_per_word: float, branch: int):
        self._random, self._rate = random.Random(plan.seed), tokens_per_word
        self._history: list[tuple[int, Message]] = [(0, {"role": "system", "content": self._text(plan.system)})]
        self._random.seed(f"{plan.seed} {branch}")
        self._turn = 0

    def _text(self, tokens: int) -> str:
        return text(self._random, round(tokens / self._rate))

    def ask(self, tokens: int) -> None:
        self._turn += 1
        self._history.append((self._turn, {"role": "user", "content": self._text(tokens)}))

    def answered(self, reply: ServerReply, call: bool) -> None:
        """The assistant's message; with a `call` that the client makes up, since a small model makes none."""
        reasoning, content = reply.said["reasoning_content"], reply.said["content"]
        if not reasoning and THINK_END in content:  # some servers tell reasoning apart only in whole answers
            reasoning, _, content = content.partition(THINK_END)
            content = content.lstrip("\n")
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning.removeprefix(THINK)
        if call:
            arguments = json.dumps({"path": f"{self._random.choice(WORDS)}.txt"})
            function = {"name": "read", "arguments": arguments}
            message["tool_calls"] = [{"id": f"call_{self._turn}", "type": "function", "function": function}]
        self._history.append((self._turn, message))

    def result(self, tokens: int) -> None:
        message = {"role": "tool", "tool_call_id": f"call_{self._turn}", "content": self._text(tokens)}
        self._history.append((self._turn, message))

    def messages(self) -> list[Message]:
        """The prompt. A template leaves out old reasoning by itself; half of an old answer without any is left out."""
        return [
            message | {"content": message["content"][len(message["content"]) // 2 :].lstrip()}
            if turn < self._turn and message["role"] == "assistant" and "reasoning_content" not in message
            else message
            for turn, message in self._history
        ]


def text(choose: random.Random, words: int) -> str:
    return " ".join(choose.choice(WORDS) for _ in range(words))


def tokens_per_word(server: Server, plan: ConversationPlan) -> float:
    message = {"role": "user", "content": text(random.Random(f"probe {plan.seed}"), PROBED)}
    return server.ask([message], [], 1).prompt / PROBED


def accepted_tools(server: Server) -> Sequence[Message]:
    """The tools, or none where the model's chat template or the server knows none."""
    try:
        server.ask([{"role": "user", "content": "Hello"}], TOOLS, 1)
    except UserError as error:
        print(f"{server.name}: without tools, since it says: {str(error)[:160]}")
        return []
    return TOOLS


def held(server: Server, plan: ConversationPlan, rate: float) -> Iterator[Row]:
    """Rows of the conversation's requests."""
    conversations, tools = [Conversation(plan, rate, i) for i in range(plan.branches)], accepted_tools(server)
    earlier: list[tuple[list[int], int]] = []  # prompts, and the number of tokens of their answers
    for turn, conversation in itertools.product(range(1, plan.turns + 1), conversations):
        for number in range(plan.calls + 1):
            if number:
                conversation.result(plan.result)
            else:
                conversation.ask(plan.question)
            messages = conversation.messages()
            ids = server.ids(messages, tools)
            reply = server.ask(messages, tools, plan.answer)
            row: Row = {"server": server.name, "turn": turn, "request": "result" if number else "question"}
            row |= {"prompt": reply.prompt, "prefilled": reply.computed, "ttft_ms": 1e3 * reply.ttft}
            if ids:
                row["needed"] = min((new_tokens(ids, *before) for before in earlier), default=len(ids))
                earlier.append((ids, reply.tokens))
            conversation.answered(reply, call=number < plan.calls)
            yield row | {"tokens": reply.tokens}


def new_tokens(ids: Sequence[int], before: Sequence[int], answer: int) -> int:
    """Tokens of `ids` behind what they have in common with the prompt `before` and its answer."""
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False)))
    return max(1, len(ids) - common - (answer if common == len(before) else 0))


COLUMNS = [
    ("server", "server", 20, ""),
    ("turn", "turn", 6, ""),
    ("request", "request", 10, ""),
    ("prompt", "prompt", 8, ""),
    ("prefilled", "prefilled", 11, ""),
    ("needed", "needed", 8, ""),
    ("ttft_ms", "ttft_ms", 9, ".0f"),
    ("tokens", "answer", 8, ""),
]
TOTALS = [
    ("server", "server", 20, ""),
    ("prompt", "prompts", 10, ""),
    ("prefilled", "prefilled", 11, ""),
    ("needed", "needed", 8, ""),
    ("ttft_2", "ttft_2", 9, ".0f"),
    ("ttft_last", "ttft_last", 11, ".0f"),
]


def totals(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each server, with the mean time to the first token of the second turn's questions and the last's."""
    for name in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == name]
        sums: Row = {key: sum(row[key] for row in own) for key in ("prompt", "prefilled", "needed") if key in own[0]}
        times: dict[int, list[float]] = {}
        for row in own:
            if row["request"] == "question":
                times.setdefault(row["turn"], []).append(row["ttft_ms"])
        means = [statistics.fmean(of_turn) for of_turn in times.values()]
        yield {"server": name} | sums | {"ttft_2": means[:2][-1], "ttft_last": means[-1]}


def per_turn(rows: Sequence[Row], server: str, key: str) -> dict[int, int]:
    """The sum of each turn's requests."""
    sums: dict[int, int] = {}
    for row in rows:
        if row["server"] == server and key in row:
            sums[row["turn"]] = sums.get(row["turn"], 0) + row[key]
    return sums


def draw(path: Path | None, rows: Sequence[Row]) -> None:
    if not path:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    servers = list(dict.fromkeys(row["server"] for row in rows))
    for name in servers:
        sums = per_turn(rows, name, "prefilled")
        axes.plot([*sums], [*sums.values()], "o-", label=name)
    if needed := next(filter(None, (per_turn(rows, name, "needed") for name in servers)), None):
        axes.plot([*needed], [*needed.values()], "k:", label="needed")
    axes.set(xlabel="turn", ylabel="tokens prefilled", yscale="log", xticks=[*sums])
    axes.legend()
    axes.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))


@contextmanager
def opened(name: str, settings: Sequence[str]) -> Iterator[Server]:
    """The server that `name` stands for."""
    label, given, url = name.partition("=")
    if given:
        yield Server(label, url)
        return
    with serving_peers.started(serving_peers.umbra(name, name, settings)) as client:
        yield Server(name, f"http://127.0.0.1:{client.port}")


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("servers", nargs="+", metavar="SERVER", help="a case, or NAME=URL")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of cases")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--branches", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1, help="calls of a tool in a turn")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=100, help="tokens of a user's message")
    parser.add_argument("--result", type=int, default=300, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="default: one that no cache knows")
    args = parser.parse_args(argv)
    plan = ConversationPlan(
        args.turns, args.branches, args.calls, args.system, args.question, args.result, args.answer, args.seed
    )
    rows: list[Row] = []
    rate = 0.0
    settings = [f"threads={args.threads}", f"instruction_set={args.instruction_set}", *args.set]
    for name in args.servers:
        with opened(name, settings) as server:
            rate = rate or tokens_per_word(server, plan)
            rows += printed(held(server, plan, rate), COLUMNS)
    summary = printed(totals(rows), TOTALS)
    write_rows(args.json, rows, totals=summary, plan=asdict(plan), settings=settings)
    draw(args.plot, rows)


if __name__ == "__main__":
    run_main(main)
