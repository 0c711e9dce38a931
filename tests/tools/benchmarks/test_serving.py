"""The load generators against a front with a fake engine, and what is made of their rows."""

import asyncio
import json
from pathlib import Path

from tests.serving.api.front import serving
from umbra.tools.benchmarks import conversation
from umbra.tools.benchmarks.serving_client import Client, TimedAnswer, TimedCall, figures, looked_at, random_calls


def test_a_closed_and_an_open_loop() -> None:
    async def run() -> None:
        engine = {"cached_tokens": 7}
        async with serving(lambda submit: [65 + i % 20 for i in range(200)], engine=engine) as server:
            client = Client(server.port)
            assert (await client.get("/health"))[0] == 200
            answers = await client.streams(random_calls("a", 6, 5, 12, 90), 3)
            assert [(a.error, a.tokens, len(a.times), a.cached_tokens) for a in answers] == [("", 12, 12, 7)] * 6
            assert all(a.ttft > 0 and len(a.gaps) == 11 and min(a.gaps) >= 0 for a in answers)
            calls = [TimedCall([65], 4, at) for at in (0.0, 0.3)]
            first, second = await client.arrivals(calls)
            assert second.sent > first.sent
            wrong = await client.arrivals([TimedCall([], 4)])
            assert "400" in wrong[0].error
            row = figures([*answers, *looked_at(wrong)])
            assert (row["sent"], row["failed"], row["tokens_per_chunk"]) == (7, 1, 1.0)

    asyncio.run(run())
    assert asyncio.run(Client(1).get("/health")) == (0, "")


def test_an_answer_that_comes_in_odd_pieces() -> None:
    answer = TimedAnswer(1.0, [(2.0, b'data: {"choices": [{"te')])
    answer.pieces.append((3.0, b'xt": "a"}]}\n\n: ping\n\ndata: {"choices": [{"text"'))
    answer.pieces.append((5.0, b': "b"}], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'))
    answer.read()
    assert (answer.text, answer.times, answer.tokens, answer.error) == ("ab", [3.0, 5.0], 3, "")
    assert (answer.ttft, answer.gaps, answer.tpot) == (2.0, [2.0], 1.0)


def test_a_conversation_leaves_out_the_reasoning_of_earlier_turns(tmp_path: Path) -> None:
    """By its template, or by the client; what is needed of a prompt is what nobody has said before."""
    sizes = ["--turns=2", "--system=90", "--question=9", "--result=9", "--seed=1", f"--json={tmp_path / 'rows.json'}"]

    async def run(family: str, said: str) -> list[str]:
        async with serving(said, family, engine={"cached_tokens": 7}) as server:
            await asyncio.to_thread(conversation.main, [f"ours=http://127.0.0.1:{server.port}", *sizes])
            return [server.tokenizer.decode(submit.ids) for submit in server.engine.submitted[-4:]]

    for family, said, thought, call in (
        ("qwen35", "thoughts\n</think>\n\nsaid", "thoughts", "<function=read>"),
        ("qwen3", "thoughtssaid", "thought", '{"name": "read", "arg'),
    ):
        prompts = asyncio.run(run(family, said))
        counts = [[prompt.count(part) for prompt in prompts] for part in (thought, "said", call)]
        assert counts == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 1, 2]]
        rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
        assert [row["prompt"] - row["prefilled"] for row in rows] == [7] * 4
        assert rows[0]["needed"] == rows[0]["prompt"]
        assert rows[1]["needed"] < rows[1]["prompt"] - rows[0]["prompt"]
