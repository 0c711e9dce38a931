"""Train the demo model: a tiny but real Qwen3-MoE on Jane Austen's six novels (public domain), on one CPU core.

    .venv/bin/python -m tools.demo_model.train corpus checkpoints/austen_moe --steps 4000

Three rows of four are running text; the fourth is a dialogue in ChatML, one paragraph as the user's turn and the
next as the answer, so that `tokenizer_mode: chat` and the end-of-turn stop work with a model of this size.
The weights with the lowest validation loss are the ones written.
"""

import argparse
import itertools
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

EOS, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY, CONTEXT, BATCH, CHAT_ROWS = 4096, 256, 8, 2
HELD_OUT_CHAPTERS = 3
# Qwen's own pre-tokenizer pattern, so that the tiny tokenizer has the shape of the real one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAPTER = re.compile(r"(CHAPTER|Chapter|VOLUME|Volume)\b|(FINIS\.?|THE END|Finis)$")

Chapter = list[str]  # paragraphs


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
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
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


def model_config(eos: int | None) -> Qwen3MoeConfig:
    """9.2 M parameters; hidden, expert and query widths are multiples of 128, as 4-bit groups need."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=5,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        intermediate_size=512,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=0.003,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    config._experts_implementation = "grouped_mm"
    return config


@torch.no_grad()
def validation_loss(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> float:
    """Mean cross-entropy in nats a token over disjoint windows of the held-out chapters."""
    model.eval()
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for x in rows.split(16):
        logits = model(input_ids=x, output_router_logits=False).logits[:, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum"))
    model.train()
    return total / rows[:, 1:].numel()


def hub_config(saved: dict[str, Any]) -> dict[str, Any]:
    """The config with the key names of Qwen3-MoE checkpoints on the hub, which differ from those of transformers 5."""
    config = dict(saved)
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    return dict(sorted(config.items()))


def save(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(out)
    path = out / "config.json"
    path.write_text(json.dumps(hub_config(json.loads(path.read_text())), indent=2) + "\n")
    stop = [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END_OF_TURN)]
    generation = dict(do_sample=True, eos_token_id=stop, pad_token_id=stop[0], temperature=0.7, top_p=0.9)
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    ).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    novels = [read_novel(path) for path in sorted(args.corpus.glob("*.txt"))]
    train_chapters = [c for novel in novels for c in novel[:-HELD_OUT_CHAPTERS]]
    valid_text = ["\n".join(c) for novel in novels for c in novel[-HELD_OUT_CHAPTERS:]]
    tokenizer = train_tokenizer(["\n".join(c) for c in train_chapters])
    prose = encode(tokenizer, ["\n".join(c) + EOS for c in train_chapters])
    chat = encode(tokenizer, [dialogue(c) for c in train_chapters])
    valid = encode(tokenizer, [t + EOS for t in valid_text])
    chars_per_token = sum(map(len, valid_text)) / len(valid)
    print(f"{len(novels)} novels, {len(prose)} + {len(chat)} training tokens, {len(valid)} held out, "
          f"{chars_per_token:.2f} characters a token", flush=True)  # fmt: skip

    model = Qwen3MoeForCausalLM(model_config(tokenizer.token_to_id(EOS)))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def rows(data: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [data[s : s + CONTEXT] for s in random.integers(0, len(data) - CONTEXT, count)]

    def learning_rate(step: int) -> float:
        return args.lr * min((step + 1) / 100, 0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))

    log, best, best_loss = [], {}, math.inf
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        x = torch.stack(rows(prose, BATCH - CHAT_ROWS) + rows(chat, CHAT_ROWS))
        out = model(input_ids=x, labels=x)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 250 == 0 or step == args.steps:
            loss = validation_loss(model, valid)
            row = dict(
                step=step,
                train_loss=round(float(out.loss.detach()), 4),
                valid_loss=round(loss, 4),
                bits_per_character=round(loss / math.log(2) / chars_per_token, 4),
                wall_s=round(time.perf_counter() - wall),
                cpu_s=round(time.process_time() - cpu),
            )
            log.append(row)
            print(json.dumps(row), flush=True)
            if loss < best_loss:
                best_loss, best = loss, {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best)
    save(model, tokenizer, args.out)
    (args.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
