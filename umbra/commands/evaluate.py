"""Perplexity of a case's model on a text, in windows that do not overlap; optionally compared with another case.

A window does not see the text before it, so its first token is not counted in the perplexity. A comparison takes two
passes, each in a process of its own. The first runs the other case and writes its logits to a temporary folder (below
TMPDIR), vocabulary x 4 bytes for each token. The second runs the case itself and computes, over all positions,
KL(other || case) in nats and how often both prefer the same token. In addition to the model, each rank needs about
three times batch x window x vocabulary x 4 bytes of memory, however long the text is.
"""

import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from umbra.base.errors import UserError
from umbra.base.files import write_json
from umbra.commands.divergence import Divergence, LogitsWriter
from umbra.commands.logits import prefill_logits, with_room
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv, rank_env
from umbra.executor.config.load import load_model_config, model_folder
from umbra.executor.config.resolved import write_resolved
from umbra.executor.config.schema import leaves
from umbra.executor.launch.launch import launch
from umbra.executor.launch.rank import run_rank
from umbra.executor.model_runner import ModelRunner, make_runner
from umbra.models.tokenizers import tokenizer_in

LOGITS, FIGURES = "logits.f32", "figures.json"  # what the first pass leaves in the temporary folder
MOST_NAMED = 4  # keys in which two settings of a case differ, in their labels
COLUMNS = ("case", "quantization", "dtype", "tokens", "loss", "perplexity", "KL (nats)", "top-1 (%)")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The arguments of an evaluation; `against`, if given, is the case to compare with."""

    case: Case
    text: Path
    against: Case | None = None
    window: int = 256  # tokens of a window; they attend only to each other
    batch: int = 8  # windows that run together
    json: Path | None = None  # a file for the figures
    results: Path | None = None  # a folder for the ranks' logs
    label: str = ""  # of the case in the table; empty: its name
    logits: Path | None = None  # set only in the passes of a comparison: the folder of the first one's logits, figures

    def arguments(self) -> list[str]:
        """The command-line arguments of one pass or rank, which gets the case by `--resolved`."""
        pairs = [
            f"--case={self.label or self.case.name}",
            f"--text={self.text}",
            f"--window={self.window}",
            f"--batch={self.batch}",
        ]
        options = dict(json=self.json, results=self.results, logits=self.logits)
        return pairs + [f"--{name}={value}" for name, value in options.items() if value]


def evaluate(
    runner: ModelRunner, windows: list[list[int]], visit: Callable[[torch.Tensor], None] | None = None
) -> Figures:
    """Mean loss in nats over every token that has one before it in its window.

    `visit` is given the logits of each window, (tokens, vocabulary), in order.
    """
    batch_size = runner.case.data_config.batch_size
    total, count = 0.0, 0
    for start in range(0, len(windows), batch_size):
        part = windows[start : start + batch_size]
        for row, logits in zip(part, prefill_logits(runner, part), strict=True):
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
            total, count = total + float(losses), count + len(row) - 1
            if visit:
                visit(logits)
    loss = total / count
    return {"tokens": count, "loss": loss, "perplexity": math.exp(loss)}


def read_windows(case: Case, path: Path, size: int) -> list[list[int]]:
    """The token ids of the text in windows of `size`; a last window of a single token is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: not readable: {error}") from None
    ids = tokenizer_in(model_folder(case), load_model_config(case).vocab_size).encode(text, chat=False)
    if len(ids) < 2:
        raise UserError(f"--text {path}: fewer than two tokens")
    return [ids[i : i + size] for i in range(0, len(ids), size) if i + 1 < len(ids)]


def evaluate_case(asked: Evaluation, program: list[str]) -> None:
    """Evaluate and print the figures. Passes and ranks are started as `program` followed by an Evaluation's
    arguments."""
    if asked.window < 2 or asked.batch < 1:
        raise UserError(f"--window {asked.window} must be at least 2, --batch {asked.batch} at least 1")
    case = fitted(asked.case, asked)
    if asked.against:
        return compare(case, fitted(asked.against, asked), asked, program)
    if case.world_size > 1 and not rank_env().launched:
        return launch(case, [*program, *asked.arguments()])
    run_pass(case, asked)


def fitted(case: Case, asked: Evaluation) -> Case:
    """The case with room for the batch and its windows."""
    case = with_room(case, asked.batch, asked.window, new_tokens=1)
    load_model_config(case)
    return case


def compare(case: Case, other: Case, asked: Evaluation, program: list[str]) -> None:
    """Run the pass of the other case, then that of the case itself, each in a process of its own."""
    windows = read_windows(case, asked.text, asked.window)
    sizes = {load_model_config(c).vocab_size for c in (case, other)}
    if len(sizes) > 1 or read_windows(other, asked.text, asked.window) != windows:
        raise UserError(
            f"--against {other.name}: its vocabulary is not that of {case.name}: the tokenizer and vocab_size of "
            f"{model_folder(other)} and {model_folder(case)} must be the same"
        )
    needed = sum(map(len, windows)) * sizes.pop() * torch.float32.itemsize
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the folder is then removed too
    with tempfile.TemporaryDirectory(prefix="umbra-evaluate-") as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"--against {other.name}: its logits take {needed / 1e9:.2f} GB, {folder} has {free / 1e9:.2f} GB "
                "free: shorten --text, or set TMPDIR to a folder on a larger disk"
            )
        print(f"first {other.name}: its logits take {needed / 1e9:.2f} GB in {folder} until the end", flush=True)
        first = Evaluation(other, asked.text, None, asked.window, asked.batch, folder / FIGURES, logits=folder)
        ours, theirs = labels_of(case, other)
        for evaluation in (replace(first, label=theirs), replace(asked, case=case, logits=folder, label=ours)):
            write_resolved(evaluation.case, folder / "case.json")
            start_pass([*program, *evaluation.arguments(), f"--resolved={folder / 'case.json'}"])


def labels_of(case: Case, other: Case) -> tuple[str, str]:
    """The names of two cases; of one case with two settings, with the keys in which these differ."""
    if case.name != other.name:
        return case.name, other.name
    keys = [leaf.path for leaf in leaves(Case) if attrgetter(leaf.path)(case) != attrgetter(leaf.path)(other)]
    labels = []
    for one in (case, other):
        values = [f"{key.rpartition('.')[2]}={attrgetter(key)(one)}" for key in keys[:MOST_NAMED]]
        labels.append(f"{one.name} ({', '.join(values)})" if values else one.name)
    return labels[0], labels[1]


def start_pass(program: list[str]) -> None:
    """Run one pass and wait for it. If it fails, it has printed why, and this process ends with its status."""
    child = subprocess.Popen([sys.executable, *program])
    try:
        status = child.wait()
    except BaseException:  # this process was signalled to end: signal the pass as well, which ends its ranks
        child.terminate()
        child.wait()
        raise
    if status:
        sys.exit(status if status > 0 else 128 - status)


def table(rows: list[Figures]) -> str:
    """The figures as a table: the other case first, then the case that was compared with it."""
    lines = [COLUMNS]
    for row in rows:
        what = (row["case"], row["quantization"], row["dtype"], str(row["tokens"]))
        loss = (f"{row['loss']:.4f}", f"{row['perplexity']:.3f}")
        both = (f"{row['kl_divergence']:.6f}", f"{row['top1_agreement']:.2f}") if "against" in row else ("-", "-")
        lines.append(what + loss + both)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def run_pass(case: Case, asked: Evaluation) -> None:
    """One pass over the text, as this process's rank of `case`."""

    def run(results: Path, ranks: RankEnv) -> None:
        windows = read_windows(case, asked.text, asked.window)
        runner = make_runner(case, results, ranks)
        runner.setup()
        visit: LogitsWriter | Divergence | None = None
        if asked.logits and ranks.rank == 0:
            second = (asked.logits / FIGURES).exists()
            visit = Divergence(asked.logits / LOGITS) if second else LogitsWriter(asked.logits / LOGITS)
        wanted = case.quantization
        method = wanted.method if wanted.rest == "none" else f"{wanted.method}, rest {wanted.rest}"
        kept = {"quantization": method, "dtype": case.model_config.dtype}
        figures = {"case": asked.label or case.name, **kept, **evaluate(runner, windows, visit)}
        if ranks.rank > 0:
            return
        if asked.logits and isinstance(visit, Divergence):
            figures |= visit.figures() | {"against": json.loads((asked.logits / FIGURES).read_text())}
            print(table([figures["against"], figures]))
        else:
            print(
                f"{figures['tokens']} tokens: loss {figures['loss']:.4f} nats, perplexity {figures['perplexity']:.3f}"
            )
        if asked.json:
            write_json(asked.json, figures)

    run_rank(case, asked.results, run)
