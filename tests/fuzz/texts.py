"""Tokenizers, chat templates, and what models write."""

import json
import re
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target
from tests.text.checkpoints import TEMPLATES, write_tokenizer
from tests.text.test_tiktoken import RANKS, SETTINGS, lines
from tests.text.test_tiktoken import write as write_ranks
from umbra.models.registry import conventions
from umbra.models.tokenizers import tokenizer_in
from umbra.text.answer import Answer
from umbra.text.formats import Mark
from umbra.text.parser import reader
from umbra.text.template import Renderer, variables_of

TEXT = "Hello aaaa, 123!\n\n  \u65e5\u672c \U0001f642<think>"
WEATHER = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "x", "days": 2}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
]


def tokenizer(folder: Path) -> Target:
    size = write_tokenizer(folder, "qwen3")

    def run(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        opened = tokenizer_in(folder, size)
        opened.decode(opened.encode(TEXT, chat=False))
        detokenizer = opened.detokenizer([1, 2])
        detokenizer.push(range(60, 70))
        detokenizer.rest()

    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"]["vocab"] = dict(list(file["model"]["vocab"].items())[:40])  # smaller, so that mutations hit the rest
    split = {"type": "Split", "pattern": {"Regex": r" ?\w+|\s+"}, "behavior": "Isolated", "invert": False}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [1], "tokens": ["x"]}},
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    others = [
        file | {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}},
        file | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, file["pre_tokenizer"]]}},
        file | {"post_processor": template, "truncation": None},
        file
        | {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}},
        file | {"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}},
        file | {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, replace]}},
    ]
    return Target(run, [json.dumps(seed).encode() for seed in (file, *others)], longest=1 << 14)


def tokenizer_config(folder: Path) -> Target:
    size = write_tokenizer(folder, "qwen3")
    (folder / "chat_template.jinja").unlink()

    def run(data: bytes) -> None:
        (folder / "tokenizer_config.json").write_bytes(data)
        opened = tokenizer_in(folder, size)
        opened.decode(opened.encode(TEXT, chat=False))
        _ = opened.template

    plain = json.loads((folder / "tokenizer_config.json").read_text())
    token = {"content": "<|x|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    more = {
        "added_tokens_decoder": {"5": token | {"special": True}},
        "bos_token": token,
        "clean_up_tokenization_spaces": True,
    }
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "x"}]
    seeds = [plain, plain | more, plain | {"chat_template": "{{ messages }}"}, plain | {"chat_template": named}]
    seeds += [
        {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True},
        plain | {"extra_special_tokens": {"a": "b"}},
    ]
    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def tiktoken(folder: Path) -> Target:
    """Ranks, or the settings beside them."""

    def run(data: bytes) -> None:
        write_ranks(folder, lines(RANKS))
        (folder / ("tokenizer_config.json" if data[:1] == b"{" else "tiktoken.model")).write_bytes(data)
        opened = tokenizer_in(folder, len(RANKS) + 3)
        opened.decode(opened.encode(TEXT, chat=False))

    return Target(run, [lines(RANKS), json.dumps(SETTINGS).encode()], json=False)


def template(folder: Path) -> Target:
    renderer = Renderer()
    variables = variables_of(MESSAGES, {"tools": TOOLS, "eos_token": "<e>", "enable_thinking": False})

    def run(data: bytes) -> None:
        renderer.render(data.decode(errors="replace"), variables)

    parts = [
        b"{% for m in messages %}{{ m.content | trim }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        b"{% macro f(x) %}{{ x ~ caller() }}{% endmacro %}{% call f(1) %}{{ '%s' % 1 }}{% endcall %}",
        b"{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + [1] %}{{ ns.a | tojson(indent=2) }}",
        b"{{ raise_exception('x') }}",
        b"{{ messages | map(attribute='role') | join(',') }}{{ range(9) | sum }}{{ '{}'.format(1) }}",
        b"{{ cycler(1, 2).next() }}",
    ]
    return Target(run, [*(text.encode() for text in TEMPLATES.values()), *parts], json=False)


def answer(folder: Path) -> Target:
    """The first byte chooses the format, and how the text is cut."""

    def run(data: bytes) -> None:
        first, text = data[0] if data else 0, data[1:].decode(errors="replace")
        format = formats[first % len(formats)]
        parser = reader(format, TOOLS, bool(first & 64), split=bool(first & 128))
        step, parts = 1 + first % 7, []
        for i, piece in enumerate(marks.split(text)):
            cut = [Mark(piece)] if i % 2 else [piece[at : at + step] for at in range(0, len(piece), step)]
            parts += [part for text in cut for part in parser.push(text)]
        for call in Answer.of(parts + parser.finish()).tool_calls:
            if not (format and format.tokens):
                json.loads(call.arguments)

    formats = [None, *conventions().formats.values()]
    marks = re.compile(f"({'|'.join(map(re.escape, conventions().formats['harmony'].tokens))})")
    seeds = [
        b'<think>r</think>a<tool_call>\n{"name": "weather", "arguments": {"city": "x", "days": 2}}\n</tool_call>',
        b'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="days">2</parameter>\n</invoke>\n'
        b"</minimax:tool_call>",
        b"<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        b"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|end|><|start|>assistant",
        b"<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>",
        b"<|tool_call_section_begin|><|tool_call_begin|>weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        'a<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "`"}\n```<｜tool▁call▁end｜>'.encode(),
    ]
    starts = [bytes([first]) + seed for seed in seeds for first in range(len(formats))]
    return Target(run, starts, json=False, longest=512)
