"""Conversations through chat templates: tools, reasoning, arguments, what is refused; and the way back into text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.text.checkpoints import FORMAT_OF, TEMPLATES, eos_of, id_of, write_tokenizer
from umbra.base.errors import UserError
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.models.tokenizers import tokenizer_in
from umbra.text.answer import Answer
from umbra.text.chat import Chat
from umbra.text.parser import Parser
from umbra.text.tokenizer import Tokenizer

WEATHER = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
USER = {"role": "user", "content": "hi"}


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


ARGUMENTS = {"city": "Zürich", "days": 2, "more": {"a": [1, None]}}
LOOP: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [call(json.dumps(ARGUMENTS))]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
]
CHATS = {
    "no system": Chat([USER]),
    "system": Chat([{"role": "system", "content": "S"}, USER]),
    "tool loop with reasoning, two results": Chat(LOOP, TOOLS),
    "reasoning before the last user": Chat([*LOOP, {"role": "assistant", "content": "wet"}, USER], TOOLS),
    "arguments as a mapping": Chat([USER, {"role": "assistant", "content": "", "tool_calls": [call({"days": 1})]}]),
    "no arguments": Chat([USER, {"role": "assistant", "tool_calls": [call("")]}]),
}


OWN = {"harmony", "kimi_k2", "deepseek_v3", "deepseek_v31"}  # their messages are changed
OWN |= {"mistral", "mistral_json"}  # nothing follows the last message that a branch could end before


@pytest.fixture(params=sorted(TEMPLATES.keys() - OWN))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, request.param)
    return tokenizer_in(tmp_path)


@pytest.mark.parametrize("name", CHATS)
def test_tokens_equal_transformers(tokenizer: Tokenizer, name: str) -> None:
    chat = CHATS[name]
    before = json.dumps(chat.messages)
    messages = json.loads(before)
    for message in messages:  # what the OpenAI client sends, as transformers' documentation wants it
        message["content"] = message.get("content") or ""
        for call in message.get("tool_calls", []):
            given = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(given or "{}") if isinstance(given, str) else given
    hf = AutoTokenizer.from_pretrained(tokenizer.folder)
    expected, shorter = (
        hf.apply_chat_template(messages, tools=list(chat.tools) or None, add_generation_prompt=added)["input_ids"]
        for added in (True, False)
    )
    ids, (*first, end) = tokenizer.chat_prompt(chat)
    assert (ids, end) == (expected, len(shorter))
    asked = next(i for i, message in enumerate(chat.messages) if message["role"] not in ("system", "developer"))
    other = Chat([*chat.messages[:asked], {"role": "user", "content": "Zebras?"}], chat.tools, chat.settings)
    theirs = tokenizer.chat_prompt(other)
    assert len(first) <= 1
    assert theirs.branches[:-1] == tuple(first)
    assert theirs.ids[: sum(first)] == ids[: sum(first)]
    assert expected[: len(shorter)] == shorter
    assert json.dumps(chat.messages) == before


@pytest.mark.parametrize(
    ("chat", "complaint"),
    [
        ({"messages": ["hi"]}, r"messages\[0\]: 'hi' must be a mapping with a role"),
        ({"messages": [USER], "tools": [WEATHER]}, r"tools\[0\]: .* must be"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, r"messages\[0\].tool_calls: .* list of mappings"),
        ({"messages": [{"role": "assistant", "tool_calls": [call([1])]}]}, r"arguments: \[1\] must be a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [call('{"a": "\\ud800"}')]}]}, "half of a surrogate pair"),
        ({"messages": []}, "chat template failed: there are no messages"),
    ],
)
def test_what_is_no_conversation_is_one_line(tmp_path: Path, chat: dict[str, Any], complaint: str) -> None:
    write_tokenizer(tmp_path, "minimax_m2")
    with pytest.raises(UserError, match=complaint) as raised:
        tokenizer_in(tmp_path).encode_chat(Chat(**chat))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "family", [family for family in TEMPLATES if family not in ("deepseek_v3", "glm47", "qwen3_next")]
)
def test_arguments_that_were_cut_off_are_no_error(tmp_path: Path, family: str) -> None:
    """A client that sends back what it got would otherwise never get an answer again."""
    write_tokenizer(tmp_path, family)
    tokenizer = tokenizer_in(tmp_path)

    def prompt(arguments: str) -> str:
        turns: list[dict[str, Any]] = [USER, {"role": "assistant", "tool_calls": [call(arguments)]}, USER]
        return tokenizer.whole_text(tokenizer.encode_chat(Chat(turns)))

    for cut, whole in (
        ('{"town": "Ba', '{"town": "Ba"}'),
        ('{"town": "Bath", "da', '{"town": "Bath"}'),
        ("no JSON", "{}"),
    ):
        assert prompt(cut) == prompt(whole)


def test_reasoning_is_open_where_the_prompt_says_so(tmp_path: Path) -> None:
    opening = {"minimax_m2": True, "qwen3": False, "qwen3_next": True, "qwen35": True, "glm45": False, "glm47": True}
    opening |= {"kimi_k2": False, "deepseek_v3": True, "deepseek_v31": False}
    for family, opens in opening.items():
        write_tokenizer(tmp_path / family, family)
        tokenizer = tokenizer_in(tmp_path / family)
        assert tokenizer.opens_reasoning(tokenizer.encode("What does <think> mean?", chat=True)) is opens
        assert tokenizer.opens_reasoning(tokenizer.encode("long " * 40 + "<think>", chat=False))
        assert tokenizer.opens_reasoning([id_of(tokenizer, letter) for letter in "<think>ĊĊ"])
        assert not tokenizer.opens_reasoning(tokenizer.encode("<think>\nSo", chat=False))
        assert not tokenizer.opens_reasoning([])
    none = "<think>\n\n</think>\n\n"
    for family, end in (
        ("qwen3", none),
        ("qwen3_next", none),
        ("qwen35", none),
        ("glm45", "\n<think></think>"),
        ("glm47", "hi</think>"),
    ):
        tokenizer = tokenizer_in(tmp_path / family)
        silent = tokenizer.encode_chat(Chat([USER], settings={"enable_thinking": False}))
        assert tokenizer.decode(silent).endswith(end)
        assert not tokenizer.opens_reasoning(silent)
    tokenizer = tokenizer_in(tmp_path / "deepseek_v31")
    assert tokenizer.opens_reasoning(tokenizer.encode_chat(Chat([USER], settings={"thinking": True})))


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ ':' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
)


def test_system_messages_stand_where_the_template_takes_them(tmp_path: Path) -> None:
    """Developer's messages are system messages. A template that takes only the first message gets one."""
    turns = [(role, role) for role in ("system", "developer", "user", "system", "user", "assistant", "developer")]
    messages = [{"role": role, "content": f"{said} {i}"} for i, (role, said) in enumerate(turns)]
    write_tokenizer(tmp_path / "all", "qwen3")
    write_tokenizer(tmp_path / "one", "qwen3", chat_template=ONE_SYSTEM)
    texts = []
    for folder in ("all", "one"):
        tokenizer = tokenizer_in(tmp_path / folder)
        texts.append(tokenizer.whole_text(tokenizer.encode_chat(Chat(messages))))
    assert re.findall(r"im_start.>(\w+)\n", texts[0])[:-1] == [role.replace("developer", "system") for role, _ in turns]
    assert texts[1] == (
        "<|im_start|>system:system 0\n\ndeveloper 1<|im_end|>"
        "<|im_start|>user:user 2\n\nsystem 3\n\nuser 4<|im_end|>"
        "<|im_start|>assistant:assistant 5<|im_end|><|im_start|>user:developer 6<|im_end|>"
    )


def test_an_answer_behind_reasoning_that_the_prompt_ends_has_no_blank_lines(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "glm47")
    tokenizer = tokenizer_in(tmp_path)
    prompt = tokenizer.encode_chat(Chat([USER], settings={"enable_thinking": False}))
    assert tokenizer.reader(tokenizer.format("auto"), prompt).whole("\n\nHello").content == "Hello"


SAID = {"role": "assistant", "content": "I look.", "tool_calls": [call('{"city":"Ulm"}'), call({})]}
LATER = [*LOOP[:3], SAID, {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
WEATHER_0 = json.dumps(ARGUMENTS)
RENDERED = {
    "deepseek_v3": [
        "hi<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
        f"{WEATHER_0}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>rain",
        "<｜Assistant｜>I look.<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>",
        '\n{"city":"Ulm"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```',
    ],
    "deepseek_v31": [
        f"</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER_0}<｜tool▁call▁end｜>",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
        '{"city":"Ulm"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}',
    ],
    "kimi_k2": [
        "<think>look</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_arg",
        json.dumps(ARGUMENTS, ensure_ascii=False),
        "## Return of functions.weather:0\nrain",
        'functions.weather:1<|tool_call_argument_begin|>{"city": "Ulm"}',
        "functions.weather:2<|tool_call_argument_begin|>{}",
        "## Return of functions.weather:1\none",
        "## Return of functions.weather:2\ntwo",
    ],
}


def test_llama_takes_one_call_of_a_message(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama3")
    tokenizer = tokenizer_in(tmp_path)
    text = tokenizer.whole_text(tokenizer.encode_chat(Chat(LATER, TOOLS)))
    turns = [turn.partition("\n\n")[2] for turn in text.split("<|eot_id|>")]
    first = '{"name": "weather", "parameters": {"city": "Ulm"}}'
    assert turns[-5:] == [first, "one", '{"name": "weather", "parameters": {}}', "two", ""]
    assert tokenizer.format("auto") is FORMAT_OF["llama3"]


OLDER = TEMPLATES["deepseek_v3"].replace("m.tool_calls or []", "m.tool_calls if m.content is none")


@pytest.mark.parametrize(("family", "template"), [*((f, TEMPLATES[f]) for f in RENDERED), ("deepseek_v3", OLDER)])
def test_templates_that_want_calls_otherwise(tmp_path: Path, family: str, template: str) -> None:
    """As texts, or without content, which is then a message of its own; Kimi's with ids that count the calls."""
    write_tokenizer(tmp_path, family, chat_template=template)
    tokenizer = tokenizer_in(tmp_path)
    text = tokenizer.whole_text(tokenizer.encode_chat(Chat(LATER, TOOLS)))
    assert re.search(".*".join(map(re.escape, RENDERED[family])), text, re.DOTALL), text


OUTPUTS = {
    "minimax_m2": "look\n</think>\n\nOne moment.\n<minimax:tool_call>\n"
    '<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n<parameter name="days">2</parameter>\n'
    '</invoke>\n<invoke name="weather">\n</invoke>\n</minimax:tool_call>',
    "qwen3": "<think>\nlook\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "qwen35": "look\n</think>\n\nOne moment.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n"
    "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    "glm45": "\n<think>look</think>\nOne moment.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich"
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>weather\n</tool_call>",
    "qwen3_next": "look\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "glm47": "look</think>One moment.<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>weather</tool_call>",
    "kimi_k2": "<think>look</think>One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Zürich", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": 'One moment.[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]weather[ARGS]{}',
    "mistral_json": 'One moment.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}, '
    '{"name": "weather", "arguments": {}}]',
    "hy3": "look</think>One moment.\n<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n"
    "<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
    "<tool_call>weather<tool_sep>\n</tool_call>\n</tool_calls>",
    "deepseek_v31": "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Zürich", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("tags_are_special", [False, True])
@pytest.mark.parametrize("family", OUTPUTS)
def test_an_answer_that_is_sent_back_has_the_tokens_that_were_generated(
    tmp_path: Path, family: str, tags_are_special: bool
) -> None:
    """This holds whether or not the tokenizer calls the marks special, so a cached prompt still serves in the next
    turn."""
    write_tokenizer(tmp_path, family, tags_are_special)
    tokenizer = tokenizer_in(tmp_path)
    prompt = tokenizer.encode_chat(Chat([USER], TOOLS))
    generated = [*tokenizer.encode(OUTPUTS[family], chat=False), eos_of(tokenizer)]
    assert tokenizer.decode(generated) == OUTPUTS[family]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token]) for token in generated]
    assert "".join(pieces) + detokenizer.rest() == OUTPUTS[family]
    format = tokenizer.format("auto")
    assert format is FORMAT_OF[family]
    parser = Parser(format, TOOLS, tokenizer.opens_reasoning(prompt))
    answer = Answer.of([part for piece in pieces for part in parser.push(piece)] + parser.finish())
    assert (answer.reasoning, answer.content) == ("look" if "look" in OUTPUTS[family] else "", "One moment.")
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [
        ("weather", '{"city": "Zürich", "days": 2}'),
        ("weather", "{}"),
    ]
    again = tokenizer.encode_chat(Chat([USER, answer.message(), LOOP[2]], TOOLS))
    assert again[: len(prompt) + len(generated)] == prompt + generated


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_deepseeks_settings_add_bos(tmp_path: Path, kind: str) -> None:
    """Its tokenizer.json does not; in a chat the template has it."""
    write_tokenizer(tmp_path, "deepseek_v3", bos_token="<｜begin▁of▁sentence｜>")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind, "add_bos_token": True}))
    tokenizer = tokenizer_in(tmp_path)
    bos = id_of(tokenizer, "<｜begin▁of▁sentence｜>")
    assert tokenizer.encode("x", chat=False).count(bos) == (kind == "LlamaTokenizerFast")
    assert tokenizer.encode("x", chat=True).count(bos) == 1


def test_the_last_source_of_stop_ids_is_the_tokenizer(tmp_path: Path) -> None:
    assert stop_ids(tmp_path, ()) == frozenset()
    write_tokenizer(tmp_path, "minimax_m2")
    eos = id_of(tokenizer_in(tmp_path), "[e~[")
    assert stop_ids(tmp_path, ()) == {eos}
    assert stop_ids(tmp_path, (4,)) == {4}
    for text, ids in (('{"eos_token_id": 7}', {7}), ('{"eos_token_id": [7, 8]}', {7, 8}), ("{}", {4})):
        (tmp_path / "generation_config.json").write_text(text)
        assert stop_ids(tmp_path, (4,)) == ids
    write_tokenizer(tmp_path / "endless", "minimax_m2", eos_token=None)
    assert stop_ids(tmp_path / "endless", ()) == frozenset()
