"""Small tokenizers with chat templates, written from the layouts that their families document."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from text.formats import FORMATS, THINK, THINK_END

# transformers' jinja2 removes the first line break after a block, and blanks before one.
MINIMAX = """
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(last_user=-1, called=false) %}
{%- for message in turns %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{{- ']~!b[]~b]system\\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'A model answers.' }}
{%- if tools %}
{{- '\\n\\nThese tools may be called:\\n<tools>\\n' }}
{%- for tool in tools %}{{ '<tool>' ~ tool.function | tojson ~ '</tool>\\n' }}{% endfor %}
{{- '</tools>\\n\\nA call looks so:\\n<minimax:tool_call>\\n<invoke name="tool">\\n</invoke>\\n</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for message in turns %}
{%- if message.role == 'user' %}
{{- ']~b]user\\n' ~ message.content ~ '[e~[\\n' }}
{%- elif message.role == 'assistant' %}
{%- set ns.called = message.tool_calls is defined %}
{{- ']~b]ai\\n' }}
{%- if message.reasoning_content is string and loop.index0 > ns.last_user %}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '\\n<minimax:tool_call>\\n' }}
{%- for call in message.tool_calls %}
{{- '<invoke name="' ~ call.function.name ~ '">\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter name="' ~ key ~ '">' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}
{{- '</parameter>\\n' }}
{%- endfor %}
{{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- elif message.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a tool result follows no call') }}{% endif %}
{%- if loop.index0 == 0 or turns[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}
{{- '\\n<response>' ~ message.content ~ '</response>' }}
{%- if loop.last or turns[loop.index0 + 1].role != 'tool' %}{{ '[e~[\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""

QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>\\n' ~ tools | tojson ~ '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' }}
{%- if message.reasoning_content is string %}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' ~ ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""

TEMPLATES = {"minimax_m2": MINIMAX, "qwen3": QWEN3}
SPECIAL = {"minimax_m2": ["]~!b[", "]~b]", "[e~["], "qwen3": ["<|im_start|>", "<|im_end|>"]}


def write_tokenizer(folder: Path, family: str, tags_are_special: bool = False, **options: Any) -> int:
    """Writes a tokenizer of single bytes, with a token for each mark of the family; returns the size of its vocabulary.
    Its end-of-sequence token is the one that ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[family]])
    tags = [THINK, THINK_END, FORMATS[family].block, FORMATS[family].block_end]
    tokenizer.add_tokens([AddedToken(tag, special=tags_are_special, normalized=False) for tag in tags])
    settings = {"eos_token": SPECIAL[family][-1], "chat_template": TEMPLATES[family]} | options
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    return tokenizer.get_vocab_size()
