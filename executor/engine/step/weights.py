"""Fills a model from its checkpoint, from packed weights that an earlier start kept, or with random numbers."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.eagle3 import Eagle3
from umbra.executor.checkpoint.formats.scheme import Encoding, Scheme
from umbra.executor.checkpoint.load import attach_mapped, linear_modules, load_checkpoint, wanted_by
from umbra.executor.checkpoint.packed import PackedCache
from umbra.executor.checkpoint.random import random_weights
from umbra.executor.config.case import Case
from umbra.executor.config.load import draft_folder
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.plan.weight_formats import packed_facts
from umbra.models.causal_lm import CausalLM

ROUNDED = (
    "kept by no format, so rounded to 8 bits in groups of 32, which take 8.5 bits a weight: "
    "each matrix is off by 0.5 % of its norm"
)


def fill_weights(
    case: Case, folder: Path, model: CausalLM, rank: int, packed_cache: Callable[..., PackedCache]
) -> None:
    """`folder` is the checkpoint's folder; `packed_cache` makes the cache in which packed weights are kept. Rank 0
    shows the progress."""
    settings = case.quantization
    if not case.model_config.with_ckpt:
        return random_weights(model, seed=rank)
    cache, scheme = None, read_scheme(folder)
    kinds, dtype = PLATFORMS[case.platform].quantised, case.model_config.dtype
    kept = settings.method == "auto" and any(e.format and e.format.kind in kinds for e in scheme.encodings)
    packs = kept or "q8" in (settings.method, settings.rest) or settings.method == "q4"
    if packs and settings.keep_packed and PLATFORMS[case.platform].keeps_packed:
        cache = packed_cache(packed_facts(case), folder, rank, model, mapped=not case.parallel_config.expert_slots)
        if cache.load(rank == 0):
            return attach_mapped(model, folder, scheme)
    start = time.perf_counter()
    read = load_checkpoint(model, folder, scheme, model.ignores, rank == 0)
    if head := model.eagle3:
        read += load_checkpoint(head, draft_folder(case), Eagle3(), head.ignores, rank == 0)
    seconds = time.perf_counter() - start
    print(f"checkpoint: {scheme.title}; {read / 1e6:.1f} MB read at {read / 1e9 / seconds:.2f} GB/s")
    if settings.method == "q4":
        for said in sorted({e.format.spec.rounded_again for e in scheme.encodings if e.format} - {""}):
            print(f"quantization.method: q4: {said}")
    others = [e for e in scheme.encodings if not (e.format and e.format.kind in kinds)]
    if (settings.method, settings.rest) == ("auto", "none") and (counts := _counted(model, scheme, others)):
        key = "rest" if len(others) < len(scheme.encodings) else "method"
        advice = f"; quantization.{key}: q8 takes half of that" if "q8" in kinds else ""
        print(f"{counts}: kept by no format, so in {dtype}{advice}")
    rounded = [e for e in scheme.encodings if not e.exact]
    if settings.method in ("auto", "q8") and "q8" in kinds and (counts := _counted(model, scheme, rounded)):
        print(f"{counts}: {ROUNDED}")
    if cache:
        cache.save()


def _counted(model: CausalLM, scheme: Scheme, encodings: list[Encoding]) -> str:
    """Returns a text that counts the model's matrices in each of `encodings`; empty if there are none."""
    counts = Counter(scheme.encoding(module) for module in linear_modules(wanted_by(model)) if encodings)
    return ", ".join(f"{counts[e]} matrices in {e.title}" for e in encodings if counts[e])
