"""Train a demo model: a tiny but real MoE on Jane Austen's six novels (public domain), on one CPU core.

    .venv/bin/python -m umbra.tools.demo_model.train corpus checkpoints/austen_moe --steps 4000
    .venv/bin/python -m umbra.tools.demo_model.train corpus checkpoints/austen_minimax --family minimax_m2 --steps 4000
    .venv/bin/python -m umbra.tools.demo_model.train corpus checkpoints/austen_hybrid --family qwen3_5_moe --steps 850

The weights with the lowest validation loss are the ones written.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from umbra.tools.demo_model.minimax_m2 import MiniMaxM2
from umbra.tools.demo_model.qwen3_5_moe import Qwen35Moe
from umbra.tools.demo_model.qwen3_moe import Qwen3Moe
from umbra.tools.demo_model.text import CONTEXT, read_text, save_tokenizer


class DemoFamily(Protocol):
    """The parts of training in which the demo models differ."""

    model: PreTrainedModel

    def after_step(self, progress: float) -> None:
        """Called after each optimizer step; progress is the part of the run that is done."""

    def measures(self, tokens: torch.Tensor) -> dict[str, float]:
        """Returns the figures that the log has beside the loss, on the held-out chapters."""

    def save(self, out: Path) -> None:
        """Write the weights and config.json as the family's published checkpoints have them."""


FAMILIES: dict[str, type[DemoFamily]] = {"qwen3_moe": Qwen3Moe, "minimax_m2": MiniMaxM2, "qwen3_5_moe": Qwen35Moe}


@torch.no_grad()
def validation_loss(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Mean cross-entropy in nats a token over disjoint windows of the held-out chapters."""
    model.eval()
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for x in rows.split(16):
        logits = model(input_ids=x, output_router_logits=False).logits[:, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum"))
    model.train()
    return total / rows[:, 1:].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="the run's state, from where a run that was cut off goes on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    text = read_text(args.corpus)
    family = FAMILIES[args.family]()
    model = family.model
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def learning_rate(step: int) -> float:
        return args.lr * min((step + 1) / 100, 0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))

    start, spent, cpu_spent = 0, 0.0, 0.0
    log: list[dict[str, float]] = []
    best, best_loss = {}, math.inf
    if args.state and args.state.exists():
        state = torch.load(args.state, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        random, start, log, best, best_loss = (state[k] for k in ("random", "start", "log", "best", "best_loss"))
        spent, cpu_spent = log[-1]["wall_s"], log[-1]["cpu_s"]
    wall, cpu = time.perf_counter() - spent, time.process_time() - cpu_spent
    for step in range(start + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        x = text.batch(random)
        out = model(input_ids=x, labels=x)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        family.after_step(step / args.steps)
        if step % 250 == 0 or step == args.steps:
            loss = validation_loss(model, text.valid)
            row = dict(
                step=step,
                train_loss=round(float(out.loss.detach()), 4),
                valid_loss=round(loss, 4),
                bits_per_character=round(loss / math.log(2) / text.chars_per_token, 4),
                **family.measures(text.valid),
                wall_s=round(time.perf_counter() - wall),
                cpu_s=round(time.process_time() - cpu),
            )
            log.append(row)
            print(json.dumps(row), flush=True)
            if loss < best_loss:
                best_loss, best = loss, {k: v.clone() for k, v in model.state_dict().items()}
            if args.state:
                state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), random=random)
                torch.save(state | dict(start=step, log=log, best=best, best_loss=best_loss), args.state)
    model.load_state_dict(best)
    family.save(args.out)
    save_tokenizer(text.tokenizer, args.out)
    (args.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
