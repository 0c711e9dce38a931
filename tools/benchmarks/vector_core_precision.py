"""Measures what sums of eight products in half cost a model, compared with what 4 bits cost it.

    python -m umbra.tools.benchmarks.vector_core_precision [--case demo] [--tokens 512] [--text FILE] [--json FILE]

The model runs on the CPU with the plain ops, four times over the same text: with its floats; with 4-bit weights whose
products are added in float32; with those added as the kernels of ops/ascend/vector_core do: x in half, divided by a
power of two, sums of eight products in half, all others in float; and with those added in float64, which shows what any
other order of sums costs, since bfloat16 activations are then rounded the other way here and there. Printed are the
Kullback-Leibler divergence of the next token's distribution (nats, mean over positions), how often the most probable
token changes, and for each kind of matrix, on the activations of the third run, the error of the sums over the error of
4 bits, as root mean squares. With `--set dtype=float32` activations are not rounded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from umbra.base.errors import run_main
from umbra.base.files import ROOT
from umbra.commands.logits import prefill_logits, sized_for
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.config.load import load_case, model_folder
from umbra.executor.model_runner import make_runner
from umbra.executor.platform.base import ModelStep, Platform
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.config import ModelConfig
from umbra.models.tokenizers import tokenizer_in
from umbra.ops import load_ops
from umbra.ops.ascend.vector_core.planes import Planes, planes_of
from umbra.ops.ascend.weights import signed
from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised, floats
from umbra.ops.interface import SILU_EXPERTS, ExpertKind
from umbra.tools.benchmarks.output import printed, write_rows

RUN = 8
WINDOW = 128  # tokens of a sequence
GROUP = 32
TEXT = ROOT / "checkpoints/austen_moe/held_out.txt"
ONE_RANK = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, error_file="")
COLUMNS = (("what", "", 18, ""), ("kl", "KL (nats)", 14, ".3e"), ("flips", "top-1 changes", 15, ".4f"))
ERRORS = (("kind", "matrix", 18, ""), ("ratio", "sums / 4 bits", 15, ".4f"))


def halve(sums: Tensor) -> Tensor:
    """The sum of the last dimension, a power of two, in the order of the kernels; every addition is rounded to half."""
    if sums.shape[-1] == RUN:
        a = (sums[..., [0, 1, 2, 3]] + sums[..., [5, 6, 7, 4]]).half().float()
        b = (a[..., [0, 3]] + a[..., [1, 2]]).half().float()
        return (b[..., 0] + b[..., 1]).half().float()
    while sums.shape[-1] > 1:
        sums = (sums[..., 0::2] + sums[..., 1::2]).half().float()
    return sums[..., 0]


def in_runs(x: Tensor, nibbles: Tensor, planes: Planes) -> Tensor:
    """(T, N, groups): for each group the sum of products of x (T, K) and signed nibbles (N, K), both in order of K.
    Sums of eight are half, also where the kernels' runs are shorter."""
    power = torch.exp2(x.float().abs().amax(1, keepdim=True).clamp(min=1e-30).log2().floor())
    halves = (x.float() / power).half().float()
    lanes = planes.group // planes.planes // planes.unit
    split = (-1, lanes, planes.planes, planes.unit)  # of a group

    def runs(values: Tensor) -> Tensor:  # (.., groups, group / RUN, RUN): planes follow each other first
        parts = values.unflatten(-1, (-1, planes.group)).unflatten(-1, split[1:])
        return parts.transpose(-1, -2).flatten(-3).unflatten(-1, (-1, min(RUN, planes.group)))

    ours, theirs = runs(halves), runs(nibbles.float())
    return torch.stack([halve((row * theirs).half().float()).sum(-1) for row in ours]) * power[..., None]


@dataclass
class SampleMatrix:
    """A matrix (rows, columns) as floats and, if it has 4 bits, as nibbles, scales and the values that they mean."""

    rows: int
    columns: int
    format: Format
    data: Tensor
    nibbles: Tensor
    scales: Tensor
    offsets: Tensor
    values: Tensor

    @classmethod
    def of(cls, rows: int, columns: int, format: Format, device: torch.device) -> SampleMatrix:
        whole, groups = torch.zeros(rows, columns), torch.zeros(rows, columns // GROUP)
        return cls(rows, columns, format, whole, whole.clone(), groups, groups.clone(), whole.clone())

    @property
    def storages(self) -> list[Tensor]:
        return [self.data]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def fill(self, row: int, part: Tensor | Quantised) -> None:
        at = slice(row, row + len(floats(part)))
        self.data[at] = floats(part)
        if self.format.quantised:
            self.nibbles[at], scales, self.offsets[at] = signed(part, self.format)
            self.scales[at] = scales.bfloat16()
            levels = self.nibbles[at] + self.offsets[at].repeat_interleave(GROUP, 1)
            self.values[at] = levels * self.scales[at].repeat_interleave(GROUP, 1)


class SampleExperts:
    def __init__(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ):
        if kind != SILU_EXPERTS:
            raise NotImplementedError("the kernels of the vector cores know no other experts")
        self.count, self.inner = count, inner
        self.w13 = [SampleMatrix.of(2 * inner, hidden, format, device) for _ in range(count)]
        self.w2 = [SampleMatrix.of(hidden, inner, format, device) for _ in range(count)]
        self.storages = [matrix.data for matrix in (*self.w13, *self.w2)]
        self.nbytes = sum(tensor.nbytes for tensor in self.storages)

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> None:
        if which == "down":
            self.w2[expert].fill(0, part)
        else:
            self.w13[expert].fill(self.inner * (which == "up"), part)


class Emulated:
    """The plain ops with sums in `sums`: float32, float64, or float16 as the kernels of the vector cores add. `errors`
    collects squares, by kind of matrix: of the sums' error, of 4 bits' error."""

    def __init__(self, sums: torch.dtype):
        self.plain: ModuleType = load_ops("reference")  # type: ignore[assignment]
        self.sums = sums
        self.errors: dict[str, list[float]] = {}
        self.matrix, self.expert_matrices = SampleMatrix.of, SampleExperts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def linear(self, x: Tensor, weight: SampleMatrix, bias: Tensor | None) -> Tensor:
        y = self.product(x, weight, f"{weight.columns} -> {weight.rows}")
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def product(self, x: Tensor, weight: SampleMatrix, kind: str) -> Tensor:
        if not weight.format.quantised:
            return x.float() @ weight.data.T
        if self.sums == torch.float64:
            return (x.double() @ weight.values.double().T).float()
        exact = x.float() @ weight.values.T
        if self.sums == torch.float32:
            return exact
        sums = in_runs(x, weight.nibbles, planes_of(weight.columns, GROUP))
        given = x.float().unflatten(1, (-1, GROUP)).sum(-1)  # (T, groups)
        y = ((sums + given[:, None] * weight.offsets) * weight.scales).sum(-1)
        squares = self.errors.setdefault(kind, [0.0, 0.0])
        squares[0] += float((y - exact).square().sum())
        squares[1] += float((exact - x.float() @ weight.data.T).square().sum())
        return y

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: SampleExperts, first_expert: int | None) -> Tensor:
        y = torch.zeros(x.shape)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = self.product(x[rows], experts.w13[expert], "gate and up").chunk(2, 1)
            hidden = torch.nn.functional.silu(gate) * up
            y[rows] += self.product(hidden, experts.w2[expert], "down") * weights[rows, places, None].float()
        return y.to(x.dtype)


class OnCpu(Platform):
    name: ClassVar[str] = "vector_core_precision"
    collectives: ClassVar[str] = "gloo"
    quantised_head: ClassVar[bool] = False

    def __init__(self, ops: Emulated):
        self.device, self.ops = torch.device("cpu"), cast(Any, ops)

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        raise NotImplementedError

    def shadow_device(self, top_k: int, choices: Any) -> Any:
        raise NotImplementedError

    def peak_memory_bytes(self) -> int:
        return 0


def run(case: Case, windows: list[list[int]], ops: Emulated) -> Tensor:
    """Log-probabilities (tokens, vocabulary)."""

    def platform(settings: PlatformSettings, ranks: RankEnv) -> Platform:
        return OnCpu(ops)

    with TemporaryDirectory() as results:
        runner = make_runner(sized_for(case, windows, 0), Path(results), ONE_RANK)
        runner.setup(platform)
        return torch.cat(prefill_logits(runner, windows)).double().log_softmax(-1)


@dataclass(frozen=True)
class Divergences:
    by_bits: float  # KL(floats || 4 bits)
    by_sums: float  # KL(4 bits with float sums || with sums in half)
    by_order: float  # KL(4 bits with float sums || with float64 sums)
    flips: tuple[float, float, float]  # shares of positions where the most probable token changes, of the same pairs
    ratios: dict[str, float]  # kind of matrix -> error of the sums over the error of 4 bits


def compare(case: Case, ids: Sequence[int]) -> Divergences:
    windows = [list(ids[at : at + WINDOW]) for at in range(0, len(ids), WINDOW)]
    in_half = Emulated(torch.float16)
    four = replace(case, quantization=replace(case.quantization, method="q4", group_size=GROUP, zero_points=False))
    with torch.inference_mode():
        whole = run(
            replace(case, quantization=replace(case.quantization, method="none")), windows, Emulated(torch.float32)
        )
        bits, sums = run(four, windows, Emulated(torch.float32)), run(four, windows, in_half)
        order = run(four, windows, Emulated(torch.float64))
    ratios = {kind: (a / b) ** 0.5 for kind, (a, b) in in_half.errors.items()}
    pairs = ((whole, bits), (bits, sums), (bits, order))
    by_bits, by_sums, by_order = (float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs)
    flips = tuple(float((p.argmax(-1) != q.argmax(-1)).double().mean()) for p, q in pairs)
    return Divergences(by_bits, by_sums, by_order, cast(Any, flips), ratios)


def rows(divergences: Divergences) -> Iterator[dict[str, object]]:
    yield dict(what="4 bits", kl=divergences.by_bits, flips=divergences.flips[0])
    yield dict(what="sums in half", kl=divergences.by_sums, flips=divergences.flips[1])
    yield dict(what="sums in float64", kl=divergences.by_order, flips=divergences.flips[2])


def main(argv: list[str], show: Callable[..., Any] = printed) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="demo")
    parser.add_argument("--set", action="append", default=[], help="as in `umbra infer`")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    case = load_case(args.case, ["exe_mode=eager", "keep_packed=false", *args.set])
    ids = tokenizer_in(model_folder(case)).encode(args.text.read_text(), chat=False)[: args.tokens]
    divergences = compare(case, ids)
    done = show(rows(divergences), COLUMNS)
    print(f"sums in half / 4 bits: {divergences.by_sums / divergences.by_bits:.2e} of the divergence")
    done += show((dict(kind=kind, ratio=ratio) for kind, ratio in divergences.ratios.items()), ERRORS)
    write_rows(args.json, done, case=args.case, tokens=len(ids))


if __name__ == "__main__":
    run_main(main)
