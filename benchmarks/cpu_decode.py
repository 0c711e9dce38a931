"""Decode and prefill speed of the model of a case on the CPU, beside the machine's limits.

    .venv/bin/python -m benchmarks.cpu_decode [--case bench_30b_shape_cpu] [--layers N] [--batches 1 4 8]
        [--contexts 64 2048 8192 32768] [--prompts 128 512 2048 8192]
        [--format q4|q8] [--threads 2] [--json FILE] [--plot FILE]

Weights are random with zero mean; each sequence has random tokens of its own. A step takes token ids and returns logits
through the engine: packing, prefill in the case's chunks, and the replayed decode graph are included, sampling is not.
The limits are measured in the same run.

A row, of the table and of `rows` in the JSON file:
  phase          decode or prefill
  batch          decode: sequences in the step; prefill: tokens of the one prompt
  context        decode: cached tokens of each sequence, whose keys and values are random
  tokens_per_s, ms (median of a step)
  experts        mean number of different experts used in a layer, counted from the router's ids in the measured steps
                 (for a prompt in several chunks, in its last chunk)
  step_gb        bytes a step must read: every weight that it uses once (only the experts used, only the tokens' rows of
                 the embedding) and the cached keys and values
  read_gbps      plain reads of memory, measured in turn with the steps
  read_fraction  step_gb / time / read_gbps: 1 is the roof of decode
  int8_fraction  multiply-adds with weights / time / the int8 peak measured in turn: 1 is the roof of prefill.
                 Attention's own products count in the time, not in the multiply-adds.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import Limits, alternate
from benchmarks.output import Lines, Row, flags, plot, printed, write_rows
from benchmarks.umbra import Umbra
from errors import UserError, run_main
from models.layers.attention import PagedAttention
from models.layers.base import layers_of
from models.layers.embedding import LMHead, VocabEmbedding
from models.layers.experts import Experts
from models.layers.linear import MergedLinear, RowLinear
from models.layers.router import Router

BATCHES, CONTEXTS, PROMPTS = (1, 4, 8), (64, 2048, 8192, 32768), (128, 512, 2048, 8192)
COLUMNS = (
    ("phase", "phase", 8, ""),
    ("batch", "batch", 7, ""),
    ("context", "context", 9, ""),
    ("tokens_per_s", "tokens/s", 11, ".1f"),
    ("ms", "ms", 10, ".2f"),
    ("experts", "experts", 9, ".1f"),
    ("step_gb", "GB", 8, ".3f"),
    ("read_fraction", "of read", 9, ".2f"),
    ("int8_fraction", "of int8 peak", 14, ".2f"),
)


class Routed:
    """While open, records which experts the router chose in each layer.

    A replayed graph writes its ids to the captured tensors, so it is recorded too if it was captured meanwhile.
    """

    def __init__(self, model: nn.Module):
        self.layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
        self.ids: dict[nn.Module, Tensor] = {}  # (tokens, top_k) of the last step
        self.hits: list[int] = []

    def __enter__(self) -> "Routed":
        self.handles = [layer.register_forward_pre_hook(self._see) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def count(self) -> None:
        """Count the different experts of the last step."""
        self.hits += [len(ids.unique()) for ids in self.ids.values()]

    @property
    def experts(self) -> float:
        """Mean number of different experts of a layer over the counted steps."""
        return sum(self.hits) / len(self.hits)

    def _see(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        _, self.ids[layer] = inputs[1]  # weights and ids


def step_bytes(model: nn.Module, tokens: int, cached: int, experts: float) -> float:
    """Bytes that a step of `tokens` new tokens reads when it attends to `cached` tokens in all."""
    total = 0.0
    for _, layer in layers_of(model):
        if isinstance(layer, Experts):
            total += experts * layer.nbytes / layer.experts
        elif isinstance(layer, VocabEmbedding):
            total += tokens * layer.table[0].nbytes
        else:
            total += layer.nbytes
    caches = [a.k_cache for a in model.modules() if isinstance(a, PagedAttention)]
    return total + sum(2 * cached * cache[0].nbytes / cache.shape[3] for cache in caches)  # (pages, heads, width, size)


def step_macs(model: nn.Module, tokens: int, logit_rows: int, top_k: int) -> float:
    """Multiply-adds with weights in a step of `tokens` tokens, of which `logit_rows` pass the last attention."""
    layers, total, rows = layers_of(model), 0.0, tokens
    *_, last = (path for path, _ in layers if path.endswith("self_attn.o_proj"))
    for path, layer in layers:
        if isinstance(layer, Experts):
            total += rows * top_k * layer.elements / layer.experts
        elif isinstance(layer, (MergedLinear, RowLinear, Router, LMHead)):
            total += rows * layer.elements
        if path == last:
            rows = logit_rows
    return total


def measure(
    engine: Umbra,
    limits: Limits,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    seconds: float,
) -> Iterator[Row]:
    """The rows for each (context, batch) of `decodes` and each length of `prompts`."""
    generator = torch.Generator().manual_seed(0)
    model, top_k = engine.model, engine.config.experts_per_token

    def timed(step: Callable[[], object], least: int, routed: Routed) -> dict[str, float]:
        runs = {"step": step, "count": routed.count, "read": limits.read, "multiply": limits.multiply}
        return alternate(runs, seconds, least)

    def row(
        phase: str, batch: int, context: int, cached: int, logit_rows: int, experts: float, took: dict[str, float]
    ) -> Row:
        size, read = step_bytes(model, batch, cached, experts), limits.read_gbps(took["read"])
        macs = step_macs(model, batch, logit_rows, top_k)
        return dict(
            phase=phase, batch=batch, context=context, tokens_per_s=batch / took["step"], ms=took["step"] * 1e3,
            experts=experts, step_gb=size / 1e9, read_gbps=read, read_fraction=size / took["step"] / 1e9 / read,
            int8_fraction=macs / took["step"] / 1e9 / limits.int8_gmacs(took["multiply"]),
        )  # fmt: skip

    for context, batch in decodes:
        engine.assume(engine.random_prompts(batch, context, generator))
        with Routed(model) as routed:
            engine.capture_again()  # so that Routed records the ids of this graph

            def decode(batch: int = batch) -> None:
                engine.step([row[0] for row in engine.random_prompts(batch, 1, generator)])

            took = timed(decode, 7, routed)
        yield row("decode", batch, context, batch * (context + 1), batch, routed.experts, took)
    for length in prompts:
        with Routed(model) as routed:

            def prefill(length: int = length) -> None:
                engine.prefill(*engine.random_prompts(1, length, generator))

            took = timed(prefill, 3, routed)
        yield row("prefill", length, 0, length, 1, routed.experts, took)


def panels(rows: list[Row]) -> dict[str, Lines]:
    decode: dict[str, tuple[list[float], list[float]]] = {}
    for context in dict.fromkeys(r["context"] for r in rows if r["phase"] == "decode"):
        mine = [r for r in rows if r["phase"] == "decode" and r["context"] == context]
        decode[f"of the read rate, {context} cached"] = [r["batch"] for r in mine], [r["read_fraction"] for r in mine]
    prefill = [r for r in rows if r["phase"] == "prefill"]
    peak = {"of the int8 peak": ([r["batch"] for r in prefill], [r["int8_fraction"] for r in prefill])}
    return {"sequences (decode)": decode, "tokens of the prompt (prefill)": peak}


def main(argv: list[str]) -> None:
    parser = flags(__doc__)
    parser.add_argument("--case", default="bench_30b_shape_cpu", help="whose shapes")
    parser.add_argument("--layers", type=int, help="default: the case's")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences in a decode step")
    parser.add_argument("--format", choices=("q4", "q8"), default="q4", help="of the weights; the head is always q8")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="cached tokens of each sequence")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of a prompt")
    parser.add_argument("--kv-dtype", default="auto", help="type of cached keys and values")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured for each row")
    args = parser.parse_args(argv)
    for flag in ("contexts", "batches", "prompts"):
        if min(getattr(args, flag)) < 1:
            raise UserError(f"--{flag} {min(getattr(args, flag))}: must be at least 1")
    longest = max(*args.prompts, *args.contexts)
    engine = Umbra(
        args.case, args.layers, args.format, args.threads, args.instruction_set, max(args.batches), longest,
        args.kv_dtype,
    )  # fmt: skip
    decodes = list(itertools.product(args.contexts, args.batches))
    rows = printed(measure(engine, Limits(), decodes, args.prompts, args.seconds), COLUMNS)
    settings = {key: getattr(args, key) for key in ("case", "format", "kv_dtype", "threads", "instruction_set")}
    write_rows(args.json, rows, layers=engine.config.num_hidden_layers, **settings)
    plot(args.plot, panels(rows), "fraction of the machine's limit")


if __name__ == "__main__":
    run_main(main)
