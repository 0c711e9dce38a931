"""Small tokenizers with chat templates, written from the layouts that their families document."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from umbra.models.registry import conventions
from umbra.text.formats import THINK, THINK_END

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

# Qwen3-Next Thinking: prompts end within reasoning.
NEXT = QWEN3.replace("enable_thinking is false else ''", "enable_thinking is false else '<think>\\n'")
assert NEXT != QWEN3

# Qwen3.5 and 3.6.
QWEN35 = """
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nA call: <tool_call>\\n<function=f>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>' }}
{{- '\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content, thoughts = m.content | trim, m.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query or (preserve_thinking is defined and preserve_thinking) %}
{{- '<think>\\n' ~ thoughts | trim ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if not loop.first else '\\n\\n' if content else '' }}
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' ~ ('\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""

GLM45 = """
{{- '[gMASK]<sop>' }}
{%- macro shown(content) %}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|system|>\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson(ensure_ascii=False) ~ '\\n' }}{% endfor %}
{{- '</tools>\\n<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = shown(m.content) %}
{%- if m.role == 'assistant' %}
{%- set thoughts = '' %}
{%- if m.reasoning_content is string %}
{%- set thoughts = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- set kept = loop.index0 > ns.last_user or (clear_thinking is defined and not clear_thinking) %}
{{- '<|assistant|>\\n<think>' ~ (thoughts.strip() if kept else '') ~ '</think>' }}
{%- if content.strip() %}{{ '\\n' ~ content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '\\n<tool_call>' ~ call.name ~ '\\n' }}
{%- for key, value in call.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
{%- else %}
{{- '<|' ~ m.role ~ '|>\\n' ~ content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' ~ ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
# Prompts end within reasoning, or behind it; and there are fewer line breaks.
GLM47 = GLM45
for before, after in (
    ("'\\n<think></think>' if", "'</think>' if"),
    ("enable_thinking else '')", "enable_thinking else '<think>')"),
    ("<|assistant|>\\n<think>", "<|assistant|><think>"),
    ("'\\n' ~ content.strip()", "content.strip()"),
    ("'\\n<tool_call>' ~ call.name ~ '\\n'", "'<tool_call>' ~ call.name"),
    ("'</arg_key>\\n<arg_value>'", "'</arg_key><arg_value>'"),
    ("'</arg_value>\\n'", "'</arg_value>'"),
):
    assert GLM47.count(before) == 1
    GLM47 = GLM47.replace(before, after)

HARMONY = """
{%- macro type_of(schema) %}
{%- if schema.type == 'array' %}{{ type_of(schema['items']) ~ '[]' }}
{%- elif schema.properties %}
{%- for key, value in schema.properties.items() %}{{ key ~ ': ' ~ type_of(value) ~ ', ' }}{% endfor %}
{%- else %}{{ schema.type or 'any' }}{% endif %}
{%- endmacro %}
{%- set last = namespace(name=none, final=false) %}
{{- '<|start|>system<|message|>' ~ (model_identity or 'A model.') ~ '\\n' ~ strftime_now('%Y') ~ '\\nReasoning: ' }}
{{- reasoning_effort or 'medium' }}
{%- for tool in builtin_tools or [] %}{{ '\\n## ' ~ tool }}{% endfor %}
{{- '<|end|>' }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}
{{- '<|start|>developer<|message|>' ~ (messages[0].content if messages[0].role == 'system' else '') }}
{%- for tool in tools or [] %}
{%- set tool = tool.function %}
{{- '// ' + tool.description + '\\ntype ' + tool.name + ' = ' ~ type_of(tool.parameters or {}) }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for m in turns %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('marks of channels in content') }}{% endif %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking together') }}{% endif %}
{%- set last.final = false %}
{%- for later in turns[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{% set last.final = true %}{% endif %}
{%- endfor %}
{%- if m.thinking and not last.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{%- set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
{{- '<|end|>' }}
{%- elif m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

KIMI = """
{%- set ns = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson(separators=(',', ':')) ~ '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
{{- {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, '<|im_system|>') }}
{{- (m.get('name') or m.role) ~ '<|im_middle|>' }}
{%- if m.role == 'assistant' %}
{{- '<think>' ~ (m.reasoning_content or '' if loop.index0 > ns.user else '') ~ '</think>' ~ m.content }}
{%- for call in m.get('tool_calls') or [] %}
{%- set arguments = call.function.arguments %}
{{- '<|tool_calls_section_begin|>' if loop.first else '' }}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- (arguments if arguments is string else arguments | tojson) ~ '<|tool_call_end|>' }}
{{- '<|tool_calls_section_end|>' if loop.last else '' }}
{%- endfor %}
{%- else %}
{{- ('## Return of ' ~ m.tool_call_id ~ '\\n' if m.role == 'tool' else '') ~ m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""

# R1: arguments are texts, and content that is empty ends another turn.
DEEPSEEK_V3 = """
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' ~ m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
{%- else %}
{%- for call in m.tool_calls or [] %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' if loop.last else '' }}
{%- endfor %}
{%- if m.content is not none %}
{{- '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

DEEPSEEK_V31 = """
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(asked=false) %}
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- ('<｜Assistant｜></think>' if ns.asked else '') ~ m.content }}
{%- for call in m.tool_calls or [] %}
{{- ('<｜tool▁calls▁begin｜>' if loop.first else '') + '<｜tool▁call▁begin｜>' + call.function.name }}
{{- '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
{%- else %}{{ ('<｜User｜>' if m.role == 'user' else '') ~ m.content }}
{%- endif %}
{%- set ns.asked = m.role == 'user' %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}
{{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

TEMPLATES: dict[str, Any] = {"minimax_m2": MINIMAX, "qwen3": QWEN3, "qwen3_next": NEXT, "qwen35": QWEN35}
TEMPLATES |= {"glm45": GLM45, "glm47": GLM47, "harmony": HARMONY, "kimi_k2": KIMI, "deepseek_v3": DEEPSEEK_V3}
TEMPLATES |= {"deepseek_v31": DEEPSEEK_V31}
NAMES = {"glm47": "glm45", "qwen3_next": "qwen3", "qwen35": "qwen3_coder"}  # of formats, where they are others
FORMAT_OF = {family: conventions().formats[NAMES.get(family, family)] for family in TEMPLATES}
QWEN_SPECIAL = ["<|im_start|>", "<|im_end|>"]
DEEPSEEK_SPECIAL = [f"<｜{name}｜>" for name in ("begin▁of▁sentence", "User", "Assistant", "end▁of▁sentence")]
GLM_SPECIAL = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
SPECIAL: dict[str, Any] = {"minimax_m2": ["]~!b[", "]~b]", "[e~["], "qwen3": QWEN_SPECIAL, "qwen3_next": QWEN_SPECIAL}
SPECIAL |= {"qwen35": QWEN_SPECIAL, "glm45": GLM_SPECIAL, "glm47": GLM_SPECIAL}
SPECIAL |= {"harmony": ["<|endoftext|>", *conventions().formats["harmony"].tokens]}
SPECIAL |= {"kimi_k2": ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]}
SPECIAL |= {"deepseek_v3": DEEPSEEK_SPECIAL, "deepseek_v31": DEEPSEEK_SPECIAL}


def write_tokenizer(folder: Path, family: str, tags_are_special: bool = False, **options: Any) -> int:
    """Writes a tokenizer of single bytes, with a token for each mark of the family; returns the size of its vocabulary.
    Its end-of-sequence token is the one that ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[family]])
    format = FORMAT_OF[family]
    marks = format.marks if format.block_is_call or format.call_is_json else (format.block, format.block_end)
    tags = () if format.tokens else (THINK, THINK_END, *marks)
    tokenizer.add_tokens([AddedToken(tag, special=tags_are_special, normalized=False) for tag in tags])
    settings = {"eos_token": SPECIAL[family][-1], "chat_template": TEMPLATES[family]} | options
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    return tokenizer.get_vocab_size()
