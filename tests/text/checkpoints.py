"""Small tokenizers with chat templates, written from the layouts that their families document."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from umbra.models.registry import conventions
from umbra.text.tokenizer import Tokenizer as TextTokenizer

FOLDER = Path(__file__).parent / "templates"  # written in the way that transformers' jinja2 reads
TEMPLATES: dict[str, str] = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
# Qwen3-Next Thinking: prompts end within reasoning.
TEMPLATES["qwen3_next"] = TEMPLATES["qwen3"].replace(
    "enable_thinking is false else ''", "enable_thinking is false else '<think>\\n'"
)
assert TEMPLATES["qwen3_next"] != TEMPLATES["qwen3"]
# Prompts end within reasoning, or behind it; and there are fewer line breaks.
GLM47 = TEMPLATES["glm45"]
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
TEMPLATES["glm47"] = GLM47
NAMES = {"glm47": "glm45", "qwen3_next": "qwen3", "qwen35": "qwen3_coder"}  # of formats, where they are others
FORMAT_OF = {family: conventions().formats[NAMES.get(family, family)] for family in TEMPLATES}
QWEN_SPECIAL = ["<|im_start|>", "<|im_end|>"]
DEEPSEEK_SPECIAL = [f"<｜{name}｜>" for name in ("begin▁of▁sentence", "User", "Assistant", "end▁of▁sentence")]
GLM_SPECIAL = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
SPECIAL: dict[str, Any] = {"minimax_m2": ["]~!b[", "]~b]", "[e~["], "qwen3": QWEN_SPECIAL, "qwen3_next": QWEN_SPECIAL}
SPECIAL |= {"qwen35": QWEN_SPECIAL, "glm45": GLM_SPECIAL, "glm47": GLM_SPECIAL}
SPECIAL |= {"harmony": ["<|endoftext|>", *conventions().formats["harmony"].tokens]}
SPECIAL |= {"kimi_k2": ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]}
MISTRAL_SPECIAL = ["[INST]", "[/INST]", "[TOOL_RESULTS]", "</s>"]
SPECIAL |= {"mistral": MISTRAL_SPECIAL, "mistral_json": MISTRAL_SPECIAL}
SPECIAL |= {"llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
SPECIAL |= {"hy3": ["<|hy_User|>", "<|hy_Assistant|>", "<|hy_eos|>"]}
SPECIAL |= {"gemma4": ["<bos>", "<|turn>", "<|tool_response>", "<turn|>"]}
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
    marks = format.marks if format.value or format.call_is_json else (*format.blocks, *format.block_ends)
    tags = () if format.tokens else (*format.thoughts, *marks)
    tokenizer.add_tokens([AddedToken(tag, special=tags_are_special, normalized=False) for tag in tags])
    settings = {"eos_token": SPECIAL[family][-1], "chat_template": TEMPLATES[family]} | options
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def id_of(tokenizer: TextTokenizer, token: str) -> int:
    """The id of a token that `tokenizer` has."""
    id: int | None = tokenizer.backend.token_to_id(token)
    assert id is not None
    return id


def eos_of(tokenizer: TextTokenizer) -> int:
    """Its end-of-sequence token."""
    assert tokenizer.record.eos_token_id is not None
    return tokenizer.record.eos_token_id
