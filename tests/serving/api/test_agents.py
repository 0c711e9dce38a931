"""Agents and chat programs as they come work for a day without an error that their user has not caused."""

from typing import Any

import pytest

from tests.serving.api.agents import OTHERS, Agent, ClaudeCode, Codex, OpenAIPython
from tests.serving.api.front import Server, family_tokenizer, run
from tests.serving.api.test_anthropic import THINKS, told
from tests.serving.api.test_structured import CALLS

AGENTS: list[type[Agent]] = [Codex, ClaudeCode, OpenAIPython]
THOUGHTS = {"qwen3": "<think>\nHm.\n</think>\n\n", "minimax_m2": "Hm.\n</think>\n\n", "harmony": ""}
LONG: dict[str, Any] = {"engine": {"longest": 1 << 20, "width": 16, "cached_tokens": 3}}


def test_the_beginning_of_an_agents_day() -> None:
    for family in THOUGHTS:
        work(family, turns=9)


@pytest.mark.thorough
@pytest.mark.parametrize("family", THOUGHTS)
def test_an_agents_day(family: str) -> None:
    work(family, turns=40)


def work(family: str, turns: int) -> None:
    """Each agent works through so many turns, in which calls, their results, cut-offs and images take turns."""
    call = THOUGHTS[family] + CALLS[family]
    answers = {"call": call, "text": f"{THOUGHTS[family]}Done." if THOUGHTS[family] else "Done."}
    now = {"answer": "call"}

    async def scenario(server: Server) -> None:
        for kind in AGENTS:
            agent = kind()
            agent.user("Shall I take an umbrella?")
            calls = 0
            for turn in range(turns):
                now["answer"] = "text" if turn % 4 == 3 else "call"
                cut = {agent.limit: len(answers["call"]) - 25} if turn % 8 == 5 else {}
                reply = await server.ask(agent.path, agent.body(**cut))
                assert reply.status == 200, (kind.__name__, turn, reply.body)
                assert b'"error":{' not in reply.body
                called = agent.take(reply)
                calls += called
                if called:
                    agent.result("It rains.", image=turn % 8 == 2)
                elif turn % 8 == 7:
                    agent.system("Be brief.")
                if not called:
                    agent.user(f"And tomorrow ({turn})?")
            assert calls > turns / 2
            last = server.engine.submitted.pop()
            assert server.tokenizer.decode(list(last.ids)).count("It rains.") > turns / 4

    run(scenario, lambda _: said(answers[now["answer"]], family), family=family, **LONG)


def said(text: str, family: str) -> list[int]:
    return family_tokenizer(family).encode(text, chat=False)


@pytest.mark.parametrize("client", OTHERS)
def test_what_other_clients_send_is_answered(client: str) -> None:
    path, body = OTHERS[client]

    async def scenario(server: Server) -> None:
        reply = await server.ask(path, {"model": "demo_chat"} | body)
        assert reply.status == 200, reply.body

    run(scenario, family="qwen3")


def test_what_codex_and_claude_code_get() -> None:
    """A header says what is left out, and no prompt has what is only for somebody else's server."""

    async def scenario(server: Server) -> None:
        agents = Codex(), ClaudeCode()
        for agent, notes in (
            (agents[0], ("tools of type web_search", "text.verbosity")),
            (agents[1], ("context_management", "inference_geo", "web_search_20250305", "claude-haiku-4-5-20251001 is")),
        ):
            agent.user("Hi")
            reply = await server.ask(agent.path, agent.body())
            assert all(note in reply.headers["warning"] for note in notes), reply.headers["warning"]
            prompt = server.tokenizer.decode(list(server.engine.submitted[-1].ids))
            assert "billing" not in prompt
            assert prompt.index("weather") < prompt.index("Hi")
        named = {"model": "claude-x", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        assert (await server.ask("/v1/messages", named)).status == 200
        assert (await server.ask("/v1/chat/completions", named)).status == 404

    run(scenario, family="minimax_m2")


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("apply_patch", {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n*** End"}),
        (
            "multi_agent_v1__spawn_agent",
            {
                "type": "function_call",
                "name": "spawn_agent",
                "namespace": "multi_agent_v1",
                "arguments": '{"town": "A"}',
            },
        ),
    ],
)
def test_tools_that_are_no_plain_functions_are_called_by_their_names(name: str, item: dict[str, Any]) -> None:
    key, value = ("input", item["input"]) if "input" in item else ("town", "A")
    head = f'<invoke name="{name}">\n<parameter name="{key}">\n'
    answer = THINKS.replace('<invoke name="weather">\n<parameter name="town">', head).replace("Łódź", f"{value}\n")

    async def scenario(server: Server) -> None:
        agent = Codex()
        agent.user("Hi")
        events = told(await server.ask(agent.path, agent.body()))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"][-1]
        assert {field: done[field] for field in item} == item
        kind = "custom_tool_call_input" if "input" in item else "function_call_arguments"
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == item.get("input", item.get("arguments"))
        agent.said += [done, {"type": f"{item['type']}_output", "call_id": done["call_id"], "output": "Well."}]
        assert (await server.ask(agent.path, agent.body())).status == 200
        assert f'"{name}"' in server.tokenizer.decode(list(server.engine.submitted[-1].ids))

    run(scenario, answer, family="minimax_m2")


def test_an_answer_that_is_begun_goes_on() -> None:
    begun = {"role": "assistant", "content": "The town is"}

    async def scenario(server: Server) -> None:
        messages = [{"role": "user", "content": "Hi"}, begun]
        asked: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        for path, body in (("/v1/chat/completions", asked), ("/v1/messages", {"messages": messages, "max_tokens": 99})):
            reply = await server.ask(path, body)
            assert reply.status == 200, reply.body
            assert server.tokenizer.whole_text(list(server.engine.submitted[-1].ids)).endswith(begun["content"])
            said = reply.json["choices"][0]["message"] if "choices" in reply.json else reply.json["content"][0]
            assert said.get("content", said.get("text")) == " Bath."
        for wrong, param in (
            ({"messages": messages[:1]}, "messages[0]"),
            ({"add_generation_prompt": True}, "add_generation_prompt"),
            ({"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
            ({"guided_regex": "a"}, "guided_regex"),
        ):
            reply = await server.ask("/v1/chat/completions", asked | wrong)
            assert (reply.status, reply.error["param"]) == (400, param)

    for family in THOUGHTS:
        run(scenario, " Bath.", family=family)


def test_tools_of_a_template_without_any_are_described() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    async def scenario(server: Server) -> None:
        reply = await server.chat(tools=[tool])
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        prompt = server.tokenizer.decode(list(server.engine.submitted[-1].ids))
        assert '"name": "weather"' in prompt
        assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" in prompt

    run(scenario, f"Hm.</think>\n{CALLS['deepseek_v3']}", family="deepseek_v3")
