"""Names of the ways in which ranks divide a model, and what each means for a case."""

import re
from collections.abc import Callable
from typing import Any

KEYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "graph": lambda _: {"exe_mode": "graph"},
    "moe": lambda ranks: {"moe_tp_size": ranks},
    "ep": lambda _: {"moe_tp_size": 1},
    "sp": lambda tokens: {"sequence_parallel_tokens": tokens},
    "chunks": lambda tokens: {"chunked_prefill_size": tokens},
    "copies": lambda slots: {"expert_slots": slots, "rebalance_steps": 1},
    "still": lambda slots: {"expert_slots": slots, "rebalance_steps": 0},
}


def overrides_of(split: str) -> dict[str, Any]:
    """Returns the keys of a case for a name such as `dp2_tp4_moe2_graph`: two data-parallel groups of four ranks; two
    ranks divide each expert (`ep`: none do; otherwise all do). `copies5`: each rank has five physical experts, which
    move after each step; `still5`: they do not move."""
    parts = {m[1]: int(m[2] or 1) for part in split.split("_") if (m := re.fullmatch(r"([a-z]+)(\d*)", part))}
    groups, tensor = parts.pop("dp", 1), parts.pop("tp", 1)
    case: dict[str, Any] = {"world_size": groups * tensor}
    case |= {"attn_tp_size": tensor} if groups > 1 else {}
    case |= {"batch_size": 8} if groups > 2 else {}
    for name, number in parts.items():
        case |= KEYS[name](number)
    return case


# With a shared expert: its parts join sums of all rows, of shares of rows, or none.
SHARED = "tp2 dp2_ep_graph dp2_ep_copies5_graph tp4_moe2_graph_sp dp2_tp2_ep dp2_tp2_chunks5_sp dp2_tp4_moe2"
