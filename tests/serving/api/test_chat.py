"""Chats and completions over HTTP, in the shapes that OpenAI's clients read."""

import asyncio
import json
from typing import Any

import pytest

from tests.serving.api.front import Server, run, until
from umbra.executor.engine.schedule.request import SamplingParams

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}

USER = {"role": "user", "content": "Hi"}


def test_a_chat_and_its_usage() -> None:
    async def scenario(server: Server) -> None:
        reply = await server.chat(max_completion_tokens=50)
        assert reply.status == 200
        body = reply.json
        prompt = len(server.engine.submitted[0].ids)
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 7,
            "total_tokens": prompt + 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert (body["object"], body["model"]) == ("chat.completion", "demo_chat")
        assert reply.headers["x-request-id"].startswith("req_")

    run(scenario, engine={"cached_tokens": 3})


def test_a_stream_has_a_role_first_a_reason_last_and_then_usage() -> None:
    async def scenario(server: Server) -> None:
        reply = await server.chat(stream=True, stream_options={"include_usage": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = reply.events
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello!"
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert {c["usage"] for c in chunks} == {None}
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 7
        assert len({c["id"] for c in chunks}) == 1
        streamed = await server.chat(
            stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.events[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == 7
        plain = (await server.chat(stream=True)).events
        assert all("usage" not in chunk for chunk in plain[:-1])

    run(scenario)


def test_a_call_that_the_limit_cuts_off_is_a_call() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ba'

    async def scenario(server: Server) -> None:
        most = len(server.tokenizer.encode(text, chat=False))
        asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most}
        choice = (await server.chat(**asked)).json["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert call["function"] == {"name": "weather", "arguments": '{"town": "Ba'}
        deltas = [c["choices"][0]["delta"] for c in (await server.chat(stream=True, **asked)).events[:-1]]
        calls = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part["arguments"] for part in calls) == '{"town": "Ba'
        assert not any(delta.get("content") for delta in deltas)

    run(scenario, text + "th")


def test_a_stop_string_that_is_shown() -> None:
    async def scenario(server: Server) -> None:
        asked: dict[str, Any] = {"stop": ["lo!"], "include_stop_str_in_output": True}
        assert (await server.complete(**asked)).json["choices"][0]["text"] == "Hello!"
        for shown, text in ((True, "Hello!"), (False, "Hel")):
            reply = await server.chat(**asked | {"include_stop_str_in_output": shown})
            assert reply.json["choices"][0]["message"]["content"] == text

    run(scenario, "Hello! Bye!")


def test_the_end_of_a_long_prompt() -> None:
    async def scenario(server: Server) -> None:
        for path, asked in (("completions", {"prompt": "abcdef"}), ("chat/completions", {"messages": [USER]})):
            await server.ask(f"/v1/{path}", asked | {"truncate_prompt_tokens": -1})
            await server.ask(f"/v1/{path}", asked | {"truncate_prompt_tokens": 2})
            whole, end = server.engine.submitted[-2:]
            assert end.ids == whole.ids[-2:]
            assert (await server.ask(f"/v1/{path}", asked | {"truncate_prompt_tokens": 0})).status == 400

    run(scenario)


def test_reasoning_is_told_apart() -> None:
    async def scenario(server: Server) -> None:
        message = (await server.chat()).json["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm, rain?"
        assert message["content"] == "Yes."
        deltas = [c["choices"][0]["delta"] for c in (await server.chat(stream=True)).events[:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm, rain?"
        assert "".join(d.get("content", "") for d in deltas) == "Yes."

    run(scenario, "Hm, rain?\n</think>\n\nYes.", family="minimax_m2")


CALLS = {
    "qwen3": 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Łódź \\"😀\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call>',
    "qwen35": '</think>I look.\n\n<tool_call>\n<function=weather>\n<parameter=town>\nŁódź "😀"\n</parameter>\n'
    "</function>\n</tool_call>\n<function=weather>\n<parameter=town>\nBath\n</function>\n</tool_call>",
    "kimi_k2": "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4<|tool_call_argument_begin|>"
    '{"town": "Łódź \\"😀\\""}<|tool_call_end|><|tool_call_begin|>functions.weather:5<|tool_call_argument_begin|>'
    '{"town": "Bath"}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("family", CALLS)
def test_tool_calls_are_streamed(family: str) -> None:
    async def scenario(server: Server) -> None:
        choice = (await server.chat(tools=[TOOL])).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        calls = choice["message"]["tool_calls"]
        assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"town": 'Łódź "😀"'}, {"town": "Bath"}]
        assert {c["type"] for c in calls} == {"function"}
        assert len({c["id"] for c in calls}) == 2
        assert family != "kimi_k2" or calls[1]["id"] == "functions.weather:5"

        streamed: dict[int, dict[str, str]] = {}
        for chunk in (await server.chat(tools=[TOOL], stream=True)).events[:-1]:
            for call in chunk["choices"][0]["delta"].get("tool_calls", []):
                if "id" in call:
                    streamed[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                streamed[call["index"]]["arguments"] += call["function"]["arguments"]
        assert [json.loads(streamed[i]["arguments"])["town"] for i in (0, 1)] == ['Łódź "😀"', "Bath"]
        one = (await server.chat(tools=[TOOL], parallel_tool_calls=False)).json["choices"][0]["message"]["tool_calls"]
        assert len(one) == 1
        # Without tools, and with tool_choice none, marks of calls are text.
        assert "tool_call" in (await server.chat()).json["choices"][0]["message"]["content"]
        plain = (await server.chat(tools=[TOOL], tool_choice="none")).json["choices"][0]
        assert "tool_call" in plain["message"]["content"]

    run(scenario, CALLS[family], family=family)


def test_variables_of_the_template_come_through_every_api() -> None:
    said, thought = {"role": "assistant", "content": "a"}, [{"type": "reasoning_text", "text": "Hm"}]
    thinking = [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "a"}]
    histories: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [USER, said | {"reasoning_content": "Hm"}, USER]},
        "responses": {"input": [USER, {"type": "reasoning", "content": thought}, said, USER]},
        "messages": {"messages": [USER, said | {"content": thinking}, USER], "max_tokens": 9},
    }

    async def scenario(server: Server) -> None:
        for path, asked in histories.items():
            for kept in (False, True):
                told = {"preserve_thinking": kept, "enable_thinking": not kept}
                assert (await server.ask(f"/v1/{path}", asked | {"chat_template_kwargs": told})).status == 200
                prompt = server.tokenizer.decode(server.engine.submitted[-1].ids)
                assert ("<think>\nHm" in prompt, prompt.endswith("</think>\n\n")) == (kept, kept)

    run(scenario, family="qwen35")


def test_deepseek_thinks_where_it_is_asked_to() -> None:
    async def scenario(server: Server) -> None:
        budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
        for path, asked, thinks in (
            ("chat/completions", {"enable_thinking": True}, True),
            ("chat/completions", {"reasoning_effort": "none"}, False),
            ("chat/completions", {"chat_template_kwargs": {"thinking": True}}, True),
            ("messages", budget, True),
        ):
            assert (await server.ask(f"/v1/{path}", {"messages": [USER], **asked})).status == 200
            prompt = server.tokenizer.decode(server.engine.submitted[-1].ids)
            assert prompt.endswith("<think>" if thinks else "</think>")
        counted = {"messages": [USER], "chat_template_kwargs": {"thinking": True}}
        assert (await server.ask("/tokenize", counted)).json["tokens"] == list(server.engine.submitted[-1].ids)

    run(scenario, family="deepseek_v31")


def test_messages_of_gpt_oss() -> None:
    thinks, shows = "<|channel|>analysis<|message|>Hm, stop.<|end|>", "<|channel|>commentary<|message|>I look.<|end|>"
    calls = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"town": "Łódź"}'

    async def scenario(server: Server) -> None:
        choice = (await server.chat(tools=[TOOL], stop="commentary")).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        said = choice["message"]
        assert (said["reasoning_content"], said["content"]) == ("Hm, stop.", "I look.")
        assert [call["function"]["arguments"] for call in said["tool_calls"]] == ['{"town": "Łódź"}']
        chunks = (await server.chat(tools=[TOOL], stream=True, logprobs=True)).events[:-1]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert ("".join(parts), len(parts) > 9) == ('{"town": "Łódź"}', True)
        assert (await server.chat(stop="stop")).json["choices"][0]["message"]["reasoning_content"] == "Hm, "
        body = (await server.complete(max_tokens=len("analysis") + 3)).json["choices"][0]
        assert body["text"] == "<|channel|>analysis<|message|>H"
        # Its own answer, sent back with the result; and what its template refuses.
        history = [USER, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "wet"}]
        told = {"builtin_tools": ["python"], "model_identity": "I am."}
        asked = {"messages": history, "tools": [TOOL], "chat_template_kwargs": told, "reasoning_effort": "low"}
        assert (await server.ask("/v1/chat/completions", asked)).status == 200
        marked = [{"role": "assistant", "content": "<|channel|>"}, USER]
        refused = await server.ask("/v1/chat/completions", {"messages": marked})
        assert (refused.status, "marks of channels" in refused.error["message"]) == (400, True)
        formatted = await server.chat(response_format={"type": "json_object"})
        assert formatted.status == 200
        grammar = server.engine.submitted[-1].sampling.grammar
        assert grammar is not None
        assert '"final"' in grammar.text
        thinking: dict[str, Any] = {"thinking": {"type": "adaptive"}, "messages": [USER], "max_tokens": 200}
        blocks = (await server.ask("/v1/messages", thinking)).json["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]

    run(scenario, f"{thinks}<|start|>assistant{shows}<|start|>assistant{calls}", family="harmony")


def test_stops_are_never_leaked() -> None:
    async def scenario(server: Server) -> None:
        body = (await server.complete(stop=["END", "nothing"], max_tokens=100)).json
        assert body["choices"][0]["text"] == "one EN two "
        assert body["choices"][0]["finish_reason"] == "stop"
        streamed = (await server.complete(stop="END", max_tokens=100, stream=True)).events[:-1]
        assert "".join(c["choices"][0]["text"] for c in streamed) == "one EN two "
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
        held = (await server.complete(stop="EN two END", max_tokens=8)).json["choices"][0]
        assert (held["text"], held["finish_reason"]) == ("one EN t", "length")  # what was held back
        assert len(server.engine.aborted) == 2
        assert server.engine.idle

    run(scenario, "one EN two END three")


@pytest.mark.parametrize("width", [1, 7])
def test_tokens_behind_a_stop_do_not_count(width: int) -> None:
    """A step gives `width` tokens, as with drafts; the last one is also the last of `max_tokens`."""

    async def scenario(server: Server) -> None:
        body = (await server.complete(stop="END", max_tokens=14, logprobs=0)).json
        assert body["usage"]["completion_tokens"] == len("one two END")
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "".join(body["choices"][0]["logprobs"]["tokens"]) == body["choices"][0]["text"] == "one two "
        metrics = (await server.get("/metrics")).body.decode()
        assert 'generation_tokens_total{model_name="demo_chat"} 11.0' in metrics
        assert 'request_success_total{finished_reason="stop",model_name="demo_chat"} 1.0' in metrics

    run(scenario, "one two END three", engine={"width": width})


def test_a_stop_token_is_no_text_where_it_ends_the_answer() -> None:
    async def scenario(server: Server) -> None:
        (id,) = server.tokenizer.encode("b", chat=False)
        for fields, text in (({}, "bab"), ({"stop_token_ids": [id]}, "ba")):
            choice = (await server.complete(ignore_eos=True, **fields)).json["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")

    run(scenario, "bab")


def test_special_tokens_are_text_where_that_is_asked() -> None:
    async def scenario(server: Server) -> None:
        for skipped, text in ((None, "ab"), (True, "ab"), (False, "a<|im_start|>b")):
            reply = await server.complete(skip_special_tokens=skipped)
            assert reply.json["choices"][0]["text"] == text

    run(scenario, "a<|im_start|>b")


def test_later_choices_wait_for_the_first_of_their_prompt() -> None:
    """They find the prompt in the cache then."""

    async def scenario(server: Server) -> None:
        asked = asyncio.create_task(server.complete(n=3))
        await until(lambda: server.engine.running)
        await asyncio.sleep(0.02)
        assert len(server.engine.submitted) == 1
        server.engine.running[0].done = 0  # its prefill has ended
        server.engine.prefill_s = 0.0
        assert [choice["text"] for choice in (await asked).json["choices"]] == ["Hello!"] * 3

    run(scenario, engine={"prefill_s": 60.0})


def test_several_choices_share_the_prompt() -> None:
    async def scenario(server: Server) -> None:
        body = (await server.chat(n=3, seed=7, temperature=1.0)).json
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [s.sampling.seed for s in server.engine.submitted] == [7, 8, 9]
        assert body["usage"]["prompt_tokens"] == len(server.engine.submitted[0].ids)
        assert body["usage"]["completion_tokens"] == 21
        events = (await server.complete(["A", "B"], n=2, stream=True, max_tokens=3)).events[:-1]
        texts = dict.fromkeys(range(4), "")
        for chunk in events:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == dict.fromkeys(range(4), "Hel")

    run(scenario)


def test_prompts_as_texts_and_ids_echo_and_logprobs() -> None:
    async def scenario(server: Server) -> None:
        ids = server.tokenizer.encode("Hé", chat=False)
        for prompt in ("Hé", ids, ["Hé"], [ids]):
            choice = (await server.complete(prompt, max_tokens=2, echo=True, logprobs=1)).json["choices"][0]
            assert choice["text"] == "HéHe"
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "H", "e"]
            assert logprobs["token_logprobs"][0] is None
            assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5
            assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
        silent = (await server.complete("Hé", max_tokens=0, echo=True, logprobs=0)).json
        assert silent["choices"][0]["text"] == "Hé"
        assert silent["choices"][0]["logprobs"]["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
        assert silent["usage"]["completion_tokens"] == 0

    run(scenario)


def test_logprobs_of_a_chat_have_bytes() -> None:
    async def scenario(server: Server) -> None:
        whole = (await server.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == "é!<|im_end|>"
        assert [len(entry["top_logprobs"]) for entry in whole] == [2] * 4
        chunks = (await server.chat(logprobs=True, top_logprobs=2, stream=True)).events[:-1]
        logprobs_of_chunks = [c["choices"][0]["logprobs"] for c in chunks]
        assert [entry for logprobs in logprobs_of_chunks if logprobs for entry in logprobs["content"]] == whole
        cut = (await server.chat(logprobs=True, stop="!")).json["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in cut).decode() == "é"

    run(scenario, "é!")


def test_settings_reach_the_engine() -> None:
    """Or those of the case; a completion has 16 tokens if it does not say, a chat as many as fit."""

    async def scenario(server: Server) -> None:
        given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.0, "top_k": 3, "min_p": 0.5, "presence_penalty": 1.0}
        given |= {"seed": 3, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "ignore_eos": True, "max_tokens": 5}
        given |= {"min_tokens": 2}
        await server.complete(**given, logit_bias={"5": -100}, stop_token_ids=[9], priority=3, cache_salt="a")
        submit = server.engine.submitted[-1]
        assert submit.sampling == SamplingParams(**given, stop_token_ids=(9,), logit_bias={5: -100.0})
        assert (submit.priority, submit.salt) == (3, b"a")
        await server.complete(top_k=-1)
        got = server.engine.submitted[-1].sampling
        assert (got.max_tokens, got.top_k) == (16, None)
        await server.chat()
        chat = server.engine.submitted[-1]
        assert (chat.sampling.temperature, chat.sampling.top_p) == (0.7, 0.9)  # as the case says
        assert chat.sampling.max_tokens == server.engine.longest - len(chat.ids)
        assert chat.sampling.seed != got.seed
        assert (len(chat.branches), submit.branches) == (2, ())

    run(scenario)


def test_messages_become_texts_under_the_templates_names() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "refusal", "refusal": "c"}]

    async def scenario(server: Server) -> None:
        for role, content, strange in (("developer", parts, {"strange": 1}), ("system", "a\nb\nc", {})):
            said = [{"role": role, "content": content, **strange}, {"role": "user", "content": "Hi"}]
            assert (await server.ask("/v1/chat/completions", {"messages": said})).status == 200
        first, second = (submit.ids for submit in server.engine.submitted)
        assert first == second

    run(scenario)


def test_tokenize_and_detokenize() -> None:
    async def scenario(server: Server) -> None:
        tokens = (await server.ask("/tokenize", {"prompt": "Hé"})).json
        assert tokens["count"] == 3
        assert tokens.keys() == {"count", "max_model_len", "tokens"}
        named = (await server.ask("/tokenize", {"prompt": "Hé", "return_token_strs": True})).json
        assert named == tokens | {"token_strs": ["H", "Ã", "©"]}
        assert (await server.ask("/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": "Hé"}
        chat = (await server.ask("/tokenize", {"messages": [{"role": "user", "content": "Hé"}]})).json
        assert (await server.ask("/detokenize", {"tokens": chat["tokens"]})).json["prompt"].endswith("assistant\n")
        wrong = await server.ask("/detokenize", {"tokens": [10**9]})
        assert (wrong.status, wrong.error["param"]) == (400, "tokens")

    run(scenario)
