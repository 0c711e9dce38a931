"""Compares the step times that the cluster model predicts with figures that others have published.

    .venv/bin/umbra bench cluster_validation [--own] [--json FILE]

Nothing is fitted: the constants are those of planner/hardware/*.yaml, measured by others on single kernels and
collectives, and the conditions are those of the publication. A figure is `complete` if its conditions say the model,
the type of the weights, the machine, the split over devices, the sequences and their lengths; of others the model
assumes what `note` says. Figures with speculative decoding do not say how many guesses came true: ACCEPTED is
of another model. With `--own`, steps on 1, 2 and 4 ranks of this machine are measured (cpu_ranks.py) and stand in the
place of published ones.

A row, of the table and of `rows` in the JSON file:
  what        model, type, machine and split
  sequences   decoded at once, in all; cached: tokens of each before the step
  predicted, published   milliseconds; ratio: predicted / published
  complete    whether all conditions are published
  note        what is missing or differs, and the source
"""

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.executor.config.load import load_case
from umbra.executor.config.platforms import PLATFORMS
from umbra.planner.benchmarks import cpu_ranks
from umbra.planner.layouts import spans_of, tokens_by_guesses
from umbra.planner.machine import read_hardware
from umbra.planner.times import Placing, Times, step_times
from umbra.planner.work import CountedRank
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

COLUMNS = (
    ("what", "what", 44, ""),
    ("sequences", "sequences", 10, ""),
    ("cached", "cached", 8, ""),
    ("predicted", "predicted", 11, ".2f"),
    ("published", "published", 11, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("complete", "complete", 10, ""),
    ("note", "  note", 4, ""),
)
HOST_VLLM_US = 1700  # between vLLM's decode steps: 1.1 to 1.4 ms free and 0.5 of sampling; Horacehxw/msModeling
HYBRID = "Horacehxw/msModeling, comm_alignment_report_20260312.md, 3.1; steps counted from its collectives"
DENSE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
QWEN3_32B = DENSE | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
}
QWEN3_8B = DENSE | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
HY3 = {
    "hidden_size": 4096,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 13312,
    "vocab_size": 120832,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}

QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", r"re:.*gate$", r"re:.*in_proj_(ba|a|b)$", r"re:mtp\."],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": INT8 | {"strategy": "channel"}, "input_activations": INT8}
    },
}
IN_W8A8 = {"quantization_config": W8A8}
ACCEPTED = (0.74, 0.48 / 0.74, 0.26 / 0.48, 0.17 / 0.26)  # of V4-Flash's guesses on A2: vllm-ascend, pull request 13640
GUESSED = (
    "%d guesses, accepted as in vllm-ascend's pull request 13640: %.2f tokens a step; sglang's best practice, 019f0132"
)


def in_w8a8(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / "checkpoints" / name / "config.json").read_text())
    return config | IN_W8A8


NEXT, M2 = in_w8a8("Qwen3-Next-80B-A3B-Instruct"), in_w8a8("MiniMax-M2.5")


@dataclass(frozen=True)
class Figure:
    """A published time of a decode step, or of a token of each sequence."""

    what: str
    case: str
    hardware: str
    ranks: tuple[int, int, int]  # world, attention tp, experts tp
    sequences: int  # in all
    cached: int
    published: float  # ms
    note: str
    complete: bool = True
    method: str = "none"
    host_us: float | None = None  # None: the hardware's
    config: dict[str, Any] | None = None  # of a model that is no case's
    dense: bool = False
    guesses: int = 0  # in each step, accepted as ACCEPTED says: by an EAGLE3 head or an MTP layer


FIGURES = (
    *(
        Figure(
            "Qwen3-32B bf16, A3, TP16, ACL graph",
            "qwen3_235b_a22b_bf16_tp16",
            "atlas_a3",
            (16, 16, 16),
            sequences,
            4096,
            published,
            HYBRID,
            host_us=HOST_VLLM_US,
            config=QWEN3_32B,
            dense=True,
        )
        for sequences, published in ((1, 15.7), (4, 15.4), (16, 19.4), (32, 29.1))
    ),
    *(
        Figure(
            f"Qwen3-8B bf16, A3, TP{ranks}, GE graph",
            "qwen3_235b_a22b_bf16_tp16",
            "atlas_a3",
            (ranks, ranks, ranks),
            1,
            4096,
            published,
            "cann-recipes-infer, models/qwen, 2026-06",
            config=QWEN3_8B,
            dense=True,
        )
        for ranks, published in ((1, 15.48), (2, 10.35))
    ),
    Figure(
        "Qwen3-235B bf16, A3, TP16, GE graph",
        "qwen3_235b_a22b_bf16_tp16",
        "atlas_a3",
        (16, 16, 16),
        1,
        1024,
        20.0,
        "an upper bound, input length not given: the seed",
        complete=False,
    ),
    Figure(
        "Hy3 295B bf16, A3, attention TP4, EP16",
        "qwen3_235b_a22b_bf16_tp16",
        "atlas_a3",
        (16, 4, 1),
        4,
        1024,
        28.44,
        "taken for Qwen3-MoE without its shared parts; batch of all dies assumed: cann-recipes-infer, hy3",
        complete=False,
        config=HY3,
    ),
    *(
        Figure(
            "Qwen3-30B-A3B int4, one 910B",
            "qwen3_30b_a3b_bf16_tp8",
            "atlas_a2",
            (1, 1, 1),
            sequences,
            640,
            published,
            "mean of 1,024 tokens after 128, prefill included; bin of the 910B and graph mode not given: the seed",
            complete=False,
            method="q4",
        )
        for sequences, published in ((1, 10.4), (4, 13.9), (8, 19.7))
    ),
    *(
        Figure(
            "MiniMax-M2.5 bf16, A3, TP16, ACL graph",
            "minimax_m2_bf16_tp16",
            "atlas_a3",
            (16, 16, 16),
            sequences,
            4608,
            published,
            f"{split}; vllm-ascend {source}",
            complete=complete,
            host_us=HOST_VLLM_US,
        )
        for sequences, published, split, source, complete in (
            (1, 20.96, "type of the weights and split of experts not given", "pull request 7376", False),
            (4, 22.16, "type of the weights and split of experts not given", "pull request 7376", False),
        )
    ),
    Figure(
        "MiniMax-M2.5 bf16, A3, TP16 EP16, ACL graph",
        "minimax_m2_bf16_tp16",
        "atlas_a3",
        (16, 16, 1),
        16,
        4608,
        31.92,
        "vllm-ascend's documents, fb8e22ec00",
        host_us=HOST_VLLM_US,
    ),
    *(
        Figure(
            "Qwen3-30B-A3B int4, 48 cores Kunpeng 920",
            "qwen3_30b_a3b_q4_cpu",
            "kunpeng_920",
            (1, 1, 1),
            sequences,
            640,
            published,
            "mean of 1,024 tokens after 128, prefill included; another engine: the seed",
            complete=False,
            method="q4",
        )
        for sequences, published in ((1, 22.8), (4, 50.7), (8, 72.5))
    ),
    *(
        Figure(
            f"{what}, A3, {split}",
            "qwen3_235b_a22b_bf16_tp16",
            "atlas_a3",
            ranks,
            sequences,
            cached,
            published,
            GUESSED % (guesses, tokens_by_guesses(ACCEPTED[:guesses])[-1]),
            complete=False,
            method="none" if "bf16" in what else "auto",
            config=config,
            guesses=guesses,
        )
        for what, split, config, ranks, guesses, sequences, cached, published in (
            ("Qwen3-235B bf16", "TP16, EAGLE3", QWEN3_235B, (16, 16, 16), 4, 1, 11750, 8.0),
            ("Qwen3-235B W8A8", "DP16 EP16, EAGLE3", QWEN3_235B | IN_W8A8, (16, 1, 1), 3, 432, 4250, 50.1),
            ("Qwen3-30B W8A8", "TP2, EAGLE3", QWEN3_30B | IN_W8A8, (2, 2, 2), 3, 1, 4250, 10.0),
            ("Qwen3-30B W8A8", "TP2, EAGLE3", QWEN3_30B | IN_W8A8, (2, 2, 2), 4, 16, 6894, 10.25),
            ("Qwen3-30B W8A8", "TP2, EAGLE3", QWEN3_30B | IN_W8A8, (2, 2, 2), 3, 160, 4250, 50.0),
            ("Qwen3-Next W8A8", "TP2, MTP", NEXT, (2, 2, 2), 3, 1, 4250, 20.0),
            ("Qwen3-Next W8A8", "DP2 TP2, MTP", NEXT, (4, 2, 4), 3, 16, 6894, 15.62),
            ("MiniMax-M2.5 W8A8", "DP16 EP16, EAGLE3", M2, (16, 1, 1), 3, 96, 4250, 20.0),
        )
    ),
    Figure(
        "Qwen3-30B-A3B bf16, TP4, 15k",
        "qwen3_30b_a3b_bf16_tp8",
        "atlas_a2",
        (4, 4, 4),
        1,
        15000,
        20.0,
        '"20+ ms", machine not given: vllm-ascend issue 4656',
        complete=False,
        host_us=HOST_VLLM_US,
    ),
)


def predicted(figure: Figure, folder: Path) -> Times:
    hardware = read_hardware(figure.hardware)
    if figure.host_us is not None:
        hardware = dataclasses.replace(hardware, device=dataclasses.replace(hardware.device, step_us=figure.host_us))
    world, attn_tp, moe_tp = figure.ranks
    settings: dict[str, object] = {
        "world_size": world,
        "attn_tp_size": attn_tp,
        "moe_tp_size": moe_tp,
        "embed_tp_size": 0,
        "lmhead_tp_size": 0,
        "quantization.method": figure.method,
        "batch_size": max(figure.sequences, world // attn_tp),
        "input_max_len": figure.cached,
    }
    settings |= PLATFORMS[hardware.platform].layout_settings
    if figure.config:
        config = full_config(figure)
        (folder / "config.json").write_text(json.dumps(config))
        settings |= {"model_path": str(folder), "model_name": config["model_type"]}
    accepted = ACCEPTED[: figure.guesses]
    if accepted:
        settings["draft_config.tokens"] = len(accepted)
    if accepted and "MTP" in figure.what:
        settings["draft_config.method"] = "mtp"
    elif accepted:
        (folder / "head").mkdir(exist_ok=True)
        (folder / "head" / "config.json").write_text(json.dumps(head_config(figure)))
        settings |= {"draft_config.method": "eagle3", "draft_config.model_path": str(folder / "head")}
    case, tokens = load_case(figure.case, settings=settings), tokens_by_guesses(accepted)
    work = CountedRank(case).decode(-(-figure.sequences // case.attn_dp_size), figure.cached, len(tokens) - 1)
    return step_times(work, Placing(spans_of(world, attn_tp)), hardware).over(tokens[-1])


def head_config(figure: Figure) -> dict[str, Any]:
    """Returns the config of an EAGLE3 head of the model's width."""
    names = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
    sizes = {name: (figure.config or {})[name] for name in names}
    sizes |= {"intermediate_size": 6 * sizes["hidden_size"], "draft_vocab_size": 32000}
    return {"model_type": "llama", "max_position_embeddings": 1 << 17, **sizes}


def full_config(figure: Figure) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "qwen3_moe", "max_position_embeddings": 1 << 17, **(figure.config or {})}
    if figure.dense:
        config["mlp_only_layers"] = list(range(config["num_hidden_layers"]))
    return config


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for figure in FIGURES:
            times = predicted(figure, Path(folder))
            yield {
                "what": figure.what,
                "sequences": figure.sequences,
                "cached": figure.cached,
                "predicted": times.total * 1e3,
                "published": figure.published,
                "ratio": times.total * 1e3 / figure.published,
                "complete": "yes" if figure.complete else "no",
                "note": "  " + figure.note,
                "parts_ms": {k: v * 1e3 for k, v in times.parts.items()},
            }


def own_rows() -> Iterator[Row]:
    """Steps on ranks of this machine, from constants measured in the same run."""
    args = cpu_ranks.options().parse_args([])
    for ranks in args.ranks:
        for row in cpu_ranks.measured(args, ranks):
            yield {
                "what": f"30B shape, 8 layers, q4, this CPU, TP{ranks}",
                "sequences": row["sequences"],
                "cached": row["cached"],
                "predicted": row["predicted"],
                "published": row["measured"],
                "ratio": row["ratio"],
                "complete": "yes",
                "note": f"  measured: {row['threads']} thread(s) a rank",
            }


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--own", action="store_true", help="also measure decode steps on ranks of this machine")
    args = parser.parse_args(argv)
    printed_rows = printed(itertools.chain(rows(), own_rows() if args.own else ()), COLUMNS)
    write_rows(args.json, printed_rows)


if __name__ == "__main__":
    run_main(main)
