"""The texts of DeepSeek's models, Kimi-K2 and Moonlight."""

from dataclasses import replace

from umbra.text.conventions import Conventions
from umbra.text.formats import OutputMarks
from umbra.text.splits import ENGLISH, LOWER, OTHER, SPACES, UPPER, WORD, Split

V3 = (  # in turn
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"{SPACES}",
)
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
    "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻"
    "𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
V2 = (  # in turn; the original's fourth may begin within spaces, which does not change what it finds
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"(?<!\s)\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}",
)
NO_HAN = tuple(rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = (
    rf"[\p{{Han}}]+|{WORD}{NO_HAN[0]}*{NO_HAN[1]}+{ENGLISH}?|{WORD}{NO_HAN[0]}+{NO_HAN[1]}*{ENGLISH}?"
    rf"|\p{{N}}{{1,3}}|{OTHER}[\r\n]*{SPACES}"
)
V31_FORMAT = OutputMarks(
    signs=("<｜tool▁sep｜>",),
    block="<｜tool▁calls▁begin｜>",
    block_end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    before_arguments="<｜tool▁sep｜>",
)
V3_FORMAT = replace(
    V31_FORMAT,
    signs=("<｜tool▁sep｜>", "```json"),
    before_name="function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```",
)
KIMI_FORMAT = OutputMarks(
    signs=("<|tool_calls_section_begin|>",),
    block="<|tool_calls_section_begin|>",
    block_end="<|tool_calls_section_end|>",
    other_block="<|tool_call_section_begin|>",
    other_block_end="<|tool_call_section_end|>",
    call="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    before_name="functions.",
    numbered=True,
    before_arguments="<|tool_call_argument_begin|>",
)
V2_TEXT = Conventions(splits={"deepseek-llm": Split(V2)}, ends=("<｜end▁of▁sentence｜>",))
V3_TEXT = Conventions(
    formats={"kimi_k2": KIMI_FORMAT, "deepseek_v3": V3_FORMAT, "deepseek_v31": V31_FORMAT},
    splits={"deepseek-v3": Split(V3), "kimi-k2": Split((KIMI,), whole=True)},
    classes={"TikTokenTokenizer": KIMI},
    ends=("<｜end▁of▁sentence｜>",),
)
