"""Chat templates are programs of strangers: whatever they do takes a second and half a gigabyte at most."""

import os
import time
from typing import Any

import pytest

from text import template
from text.template import TOO_MUCH, Renderer, variables_of
from umbra.errors import UserError

HOSTILE = {
    "loops": ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TOO_MUCH),
    "multiplied": ("{{ 'a' * 10 ** 11 }}", TOO_MUCH),
    "formatted": ("{{ '%999999999d' % 1 }}", TOO_MUCH),
    "longer than its input": ("{{ 'a' * 10 ** 7 }}", "it makes 10000000 characters of"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
    "nested statements": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "maximum recursion depth exceeded"),
    "classes": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "globals": ("{{ raise_exception.__globals__.os }}", "access to attribute '__globals__' of"),
    "classes by a filter": ("{{ ('' | attr('__class__')).__mro__ }}", "access to attribute '__class__'"),
    "a namespace's class": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "the attribute '__class__'"),
    "a list that changes": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list'"),
    "other files": ("{% include '/etc/passwd' %}", "no loader for this environment"),
    "half of a statement": ("{% if", "unexpected 'end of template'"),
}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_one_line(renderer: Renderer, name: str) -> None:
    source, complaint = HOSTILE[name]
    before = os.times()
    with pytest.raises(UserError, match=r"^the checkpoint's chat template failed: ") as raised:
        renderer.render(source, {"messages": []})
    after = os.times()
    assert complaint in str(raised.value)
    assert after.user + after.children_user - before.user - before.children_user < 2


def test_the_next_conversation_is_rendered(renderer: Renderer) -> None:
    """Also after one that has ended the process."""
    assert renderer.render("{{ a }}", {"a": "b\ud800"}) == "b\ud800"
    with pytest.raises(UserError):
        renderer.render(*HOSTILE["loops"][:1], {})
    assert renderer.render("{{ a }}", {"a": 1}) == "1"


def test_templates_see_what_transformers_shows_them(renderer: Renderer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x", "name": None}, {"role": "assistant", "reasoning": "r", "content": "y"},
    ]  # fmt: skip
    variables = variables_of(messages, {"eos_token": "<e>", "tools": None})
    source = (
        "{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% if loop.last %}{% break %}"
        "{% endif %}{% endfor %}{{ dict(a=1) }}{{ tools is none }}{{ add_generation_prompt }}{{ eos_token }}"
    )
    assert renderer.render(source, variables) == (
        '{"role": "user", "content": "x"}{"thinking": "r", "role": "assistant", "reasoning": "r", "content": "y", '
        '"reasoning_content": "r"}{\'a\': 1}TrueTrue<e>'
    )
    assert renderer.render("{{ strftime_now('%Y') }}", {}) == time.strftime("%Y")
    assert renderer.render("{% set n = namespace(a=1, b=2) %}{% set n.a = 5 %}{{ n.a + n.b }}", {}) == "7"
    ascii = "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}"
    assert renderer.render(ascii, {}) == '{"a":"\\u00e9","b":1}'
    with pytest.raises(UserError, match="failed: no system message"):
        renderer.render("{{ raise_exception('no system message') }}", {})


def test_values_that_are_no_json_are_refused_or_written(renderer: Renderer) -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(UserError, match="Circular reference"):
        renderer.render("", {"a": endless})
    assert renderer.render("{{ a }}", {"a": template.SECONDS}) == "1.0"
