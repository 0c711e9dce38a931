"""The demo models' text: the novels as tokens, the tokenizer trained on them, and the files that say how to use it.

Three rows of four are running text; the fourth is a dialogue in ChatML, one paragraph as the user's turn and the
next as the answer, so that `tokenizer_mode: chat` and the end-of-turn stop work with models of this size.
"""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from umbra.text.splits import CL100K_SINGLE_DIGITS

EOS, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EOS_ID = 0  # the tokenizer's trainer numbers the special tokens first
VOCABULARY, CONTEXT, BATCH, CHAT_ROWS = 4096, 256, 8, 2
POSITIONS = 2048
HELD_OUT_CHAPTERS = 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAPTER = re.compile(r"(CHAPTER|Chapter|VOLUME|Volume)\b|(FINIS\.?|THE END|Finis)$")

Chapter = list[str]  # paragraphs


@dataclass(frozen=True)
class DemoText:
    """The corpus as token ids: running text, dialogues, and the held-out chapters' running text."""

    tokenizer: Tokenizer
    prose: torch.Tensor
    chat: torch.Tensor
    valid: torch.Tensor
    chars_per_token: float

    def batch(self, random: np.random.Generator) -> torch.Tensor:  # (BATCH, CONTEXT)
        return torch.stack(rows(self.prose, BATCH - CHAT_ROWS, random) + rows(self.chat, CHAT_ROWS, random))


def rows(data: torch.Tensor, count: int, random: np.random.Generator) -> list[torch.Tensor]:
    return [data[s : s + CONTEXT] for s in random.integers(0, len(data) - CONTEXT, count)]


def read_text(corpus: Path) -> DemoText:
    """Read every novel in a folder; the last chapters of each are held out, from the tokenizer too."""
    novels = [read_novel(path) for path in sorted(corpus.glob("*.txt"))]
    train_chapters = [c for novel in novels for c in novel[:-HELD_OUT_CHAPTERS]]
    valid_text = ["\n".join(c) for novel in novels for c in novel[-HELD_OUT_CHAPTERS:]]
    tokenizer = train_tokenizer(["\n".join(c) for c in train_chapters])
    prose = encode(tokenizer, ["\n".join(c) + EOS for c in train_chapters])
    chat = encode(tokenizer, [dialogue(c) for c in train_chapters])
    valid = encode(tokenizer, [t + EOS for t in valid_text])
    chars_per_token = sum(map(len, valid_text)) / len(valid)
    print(
        f"{len(novels)} novels, {len(prose)} + {len(chat)} training tokens, {len(valid)} held out, "
        f"{chars_per_token:.2f} characters a token",
        flush=True,
    )
    return DemoText(tokenizer, prose, chat, valid, chars_per_token)


def read_novel(path: Path) -> list[Chapter]:
    """Chapters of paragraphs; hard-wrapped lines are joined, emphasis marks dropped."""
    chapters: list[Chapter] = [[]]
    for block in re.split(r"\n\s*\n", path.read_text()):
        paragraph = " ".join(block.split()).replace("--", " — ").replace("_", "")
        if CHAPTER.match(paragraph):
            chapters.append([])
        elif paragraph:
            chapters[-1].append(paragraph)
    return [c for c in chapters if c]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_SINGLE_DIGITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def dialogue(chapter: Chapter) -> str:
    """Consecutive pairs of short paragraphs as user and assistant turns, each pair a document of its own."""
    pairs = itertools.pairwise(chapter)
    return "".join(
        f"{TURN}user\n{a}{END_OF_TURN}\n{TURN}assistant\n{b}{END_OF_TURN}\n{EOS}"
        for a, b in pairs
        if len(a) + len(b) < 600
    )


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    return torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer, its chat template and the sampling defaults with the stop ids."""
    stop = [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END_OF_TURN)]
    generation = dict(do_sample=True, eos_token_id=stop, pad_token_id=stop[0], temperature=0.7, top_p=0.9)
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
    ).save_pretrained(out)
